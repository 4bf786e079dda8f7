//! The search for the fastest setting: coordinate descent over measurements of whole steps (report section 10). Does
//! not depend on a device.
//!
//! ```text
//! Space, start --descend--> compare(incumbent, challenger) --> Journal, one line each --> Tuned
//!                               | not measured again if it is in the journal
//! ```
//! | module | contents |
//! |---|---|
//! | [`space`] | coordinates, their choices, points |
//! | [`answer`] | the result of a comparison: paired times, or why there are none |
//! | [`search`] | the order of sweeps, which challengers are accepted, when the search ends |
//! | [`journal`] | one line per measurement, on disk before the next begins; recovery after a kill |
//! | [`key`] | what a measurement is valid for |
//!
//! An [`Objective`] measures; tests use one with invented costs.

pub mod answer;
pub mod journal;
pub mod key;
pub mod search;
pub mod space;
#[cfg(test)]
mod tests;

pub use answer::{Answer, Paired, Phase};
pub use journal::{Claim, Journal, JournalError};
pub use key::{How, Subject};
pub use search::{Limits, Objective, ObjectiveError, Progress, TuneError, Tuned, descend};
pub use space::{Axis, Coordinate, Point, Profile, Space, SpaceError};
