//! The search space: axes, their choices, and points.

use std::fmt;

use crate::options::Projection;

/// A kind of layer, tuned separately: decoders run in parallel with easy layers and not with hard ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Profile {
    /// Layers with Huffman-coded weights.
    Hard,
    /// All other layers.
    Easy,
}

impl Profile {
    /// Both profiles, in the order in which they are tuned.
    pub const ALL: [Self; 2] = [Self::Hard, Self::Easy];

    fn name(self) -> &'static str {
        match self {
            Self::Hard => "hard",
            Self::Easy => "easy",
        }
    }
}

/// A parameter of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Coordinate {
    /// The [`PipelineVariant`](crate::options::PipelineVariant) of a projection in the layers of a profile.
    Pipeline(Profile, Projection),
    /// The number of multiprocessors that decode.
    DecodeSms,
    /// The number of streams that multiply.
    Consumers,
}

impl Coordinate {
    /// The profile of the parameter; `None` if it belongs to the whole step.
    pub fn profile(self) -> Option<Profile> {
        match self {
            Self::Pipeline(profile, _) => Some(profile),
            Self::DecodeSms | Self::Consumers => None,
        }
    }
}

impl fmt::Display for Coordinate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pipeline(profile, projection) => write!(f, "{}.{}.pipeline", profile.name(), projection.name()),
            Self::DecodeSms => f.write_str("decode_sms"),
            Self::Consumers => f.write_str("consumers"),
        }
    }
}

/// A parameter with its choices by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// The parameter that the axis varies.
    pub coordinate: Coordinate,
    /// The names of its choices: at least one, and no duplicates.
    pub choices: Vec<String>,
}

/// One choice per axis, by index.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Point(Vec<usize>);

impl Point {
    /// The index of the choice of an axis.
    pub fn choice(&self, axis: usize) -> usize {
        self.0[axis]
    }

    /// Returns the point with another choice of one axis.
    pub(crate) fn with(&self, axis: usize, choice: usize) -> Self {
        let mut point = self.clone();
        point.0[axis] = choice;
        point
    }
}

/// The reason why a space or a point is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// An axis has no choices.
    #[error("{0} has no choices; remove the axis")]
    NoChoices(Coordinate),
    /// Two axes have the same coordinate.
    #[error("{0} has two axes")]
    Twice(Coordinate),
    /// Two choices of an axis have the same name.
    #[error("{coordinate} has the choice '{choice}' twice")]
    ChoiceTwice {
        /// The coordinate.
        coordinate: Coordinate,
        /// The choice.
        choice: String,
    },
    /// The number of names differs from the number of axes.
    #[error("got {got} choices for {axes} coordinates")]
    Count {
        /// The number of names.
        got: usize,
        /// The number of axes.
        axes: usize,
    },
    /// An axis has no choice of this name.
    #[error("{coordinate} cannot be '{choice}'; valid choices are {known}")]
    Unknown {
        /// The coordinate.
        coordinate: Coordinate,
        /// The requested name.
        choice: String,
        /// The names of its choices.
        known: String,
    },
}

impl SpaceError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "search-space-invalid"
    }
}

/// The axes of a search, in the order in which they are swept: those of the profiles, then those of the whole step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Space {
    axes: Vec<Axis>,
}

impl Space {
    /// A space of these axes.
    ///
    /// # Errors
    /// [`SpaceError`] if an axis is empty, or if axes or choices repeat.
    pub fn new(mut axes: Vec<Axis>) -> Result<Self, SpaceError> {
        // A stable sort: hard, easy, the whole step; within each, the given order.
        axes.sort_by_key(|axis| axis.coordinate.profile().map_or(2, |profile| profile as u8));
        for (at, Axis { coordinate, choices }) in axes.iter().enumerate() {
            if choices.is_empty() {
                return Err(SpaceError::NoChoices(*coordinate));
            }
            if axes[..at].iter().any(|other| other.coordinate == *coordinate) {
                return Err(SpaceError::Twice(*coordinate));
            }
            let twice = choices.iter().enumerate().find(|(at, choice)| choices[..*at].contains(choice));
            if let Some((_, choice)) = twice {
                return Err(SpaceError::ChoiceTwice { coordinate: *coordinate, choice: choice.clone() });
            }
        }
        Ok(Self { axes })
    }

    /// The axes in the order in which they are swept.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// The first choice of every axis.
    pub fn first(&self) -> Point {
        Point(vec![0; self.axes.len()])
    }

    /// The point with these choices, one name per axis.
    ///
    /// # Errors
    /// [`SpaceError::Count`] for another number of names, [`SpaceError::Unknown`] for a name that an axis does not
    /// have.
    pub fn point(&self, choices: &[impl AsRef<str>]) -> Result<Point, SpaceError> {
        if choices.len() != self.axes.len() {
            return Err(SpaceError::Count { got: choices.len(), axes: self.axes.len() });
        }
        let indices = self.axes.iter().zip(choices).map(|(axis, choice)| {
            let choice = choice.as_ref();
            axis.choices.iter().position(|name| name == choice).ok_or_else(|| SpaceError::Unknown {
                coordinate: axis.coordinate,
                choice: choice.chars().take(64).collect(),
                known: axis.choices.join(", "),
            })
        });
        indices.collect::<Result<_, _>>().map(Point)
    }

    /// The names of a point's choices, one per axis.
    pub fn names(&self, point: &Point) -> Vec<&str> {
        self.axes.iter().zip(&point.0).map(|(axis, choice)| axis.choices[*choice].as_str()).collect()
    }
}
