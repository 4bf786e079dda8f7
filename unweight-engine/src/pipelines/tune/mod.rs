//! The search for the fastest setting: coordinate descent over measurements of whole steps (report section 10). Names
//! no device.
//!
//! ```text
//! Space, start --descend--> compare(incumbent, challenger) --> Journal, a line each --> Tuned
//!                               | in the journal already: not measured again
//! ```
//! | module | what it knows |
//! |---|---|
//! | [`space`] | coordinates, their choices, points |
//! | [`answer`] | what a comparison gives: paired times, or why there are none |
//! | [`search`] | the order of the sweeps, what is accepted, when it ends |
//! | [`journal`] | one line a measurement, on disk before the next begins; what a kill leaves |
//! | [`key`] | for what a measurement holds |
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
