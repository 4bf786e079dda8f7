//! Coordinates, their choices, points.

use std::fmt;

use crate::options::Projection;

/// Layers that are tuned together: a decoder hides under easy layers, and not under hard ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Profile {
    /// With something to decode.
    Hard,
    /// Without.
    Easy,
}

impl Profile {
    /// Both, in the order in which they are tuned.
    pub const ALL: [Self; 2] = [Self::Hard, Self::Easy];

    fn name(self) -> &'static str {
        match self {
            Self::Hard => "hard",
            Self::Easy => "easy",
        }
    }
}

/// Something that can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Coordinate {
    /// How a projection is multiplied with: a [`PipelineVariant`](crate::options::PipelineVariant).
    Pipeline(Profile, Projection),
    /// Multiprocessors that decode.
    DecodeSms,
    /// Streams that multiply.
    Consumers,
}

impl Coordinate {
    /// The profile that it belongs to, if it is one's own.
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

/// A coordinate with its choices, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// What is chosen.
    pub coordinate: Coordinate,
    /// Between these; one at least, no two alike.
    pub choices: Vec<String>,
}

/// One choice of every axis, by its place among the axis's choices.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Point(Vec<usize>);

impl Point {
    /// The choice of an axis.
    pub fn choice(&self, axis: usize) -> usize {
        self.0[axis]
    }

    /// The same point but for one axis.
    pub(crate) fn with(&self, axis: usize, choice: usize) -> Self {
        let mut point = self.clone();
        point.0[axis] = choice;
        point
    }
}

/// Why there is no such space or point.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// An axis of nothing.
    #[error("{0} has no choices; leave it out")]
    NoChoices(Coordinate),
    /// Two axes of one coordinate.
    #[error("{0} is there twice")]
    Twice(Coordinate),
    /// Two choices of one name.
    #[error("{coordinate} has '{choice}' twice")]
    ChoiceTwice {
        /// The coordinate.
        coordinate: Coordinate,
        /// The choice.
        choice: String,
    },
    /// Names that are not one for each axis.
    #[error("{got} choices for {axes} coordinates")]
    Count {
        /// Choices.
        got: usize,
        /// Axes.
        axes: usize,
    },
    /// A name that an axis does not have.
    #[error("{coordinate} cannot be '{choice}'; it can be {known}")]
    Unknown {
        /// The coordinate.
        coordinate: Coordinate,
        /// What was asked for.
        choice: String,
        /// What there is.
        known: String,
    },
}

impl SpaceError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "search-space-invalid"
    }
}

/// Everything that can be chosen. Axes are swept in their order: the profiles' own, then those of the whole step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Space {
    axes: Vec<Axis>,
}

impl Space {
    /// A space of these axes, in the order in which they are swept.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn new(mut axes: Vec<Axis>) -> Result<Self, SpaceError> {
        // Stable: hard, easy, the whole step; within one, as given.
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

    /// Its axes.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// The first choice of every axis.
    pub fn first(&self) -> Point {
        Point(vec![0; self.axes.len()])
    }

    /// The point of these choices, one for each axis.
    ///
    /// # Errors
    /// [`SpaceError::Count`], [`SpaceError::Unknown`].
    pub fn point(&self, choices: &[impl AsRef<str>]) -> Result<Point, SpaceError> {
        if choices.len() != self.axes.len() {
            return Err(SpaceError::Count { got: choices.len(), axes: self.axes.len() });
        }
        let places = self.axes.iter().zip(choices).map(|(axis, choice)| {
            let choice = choice.as_ref();
            axis.choices.iter().position(|own| own == choice).ok_or_else(|| SpaceError::Unknown {
                coordinate: axis.coordinate,
                choice: choice.chars().take(64).collect(),
                known: axis.choices.join(", "),
            })
        });
        places.collect::<Result<_, _>>().map(Point)
    }

    /// The names of a point's choices, one for each axis.
    pub fn names(&self, point: &Point) -> Vec<&str> {
        self.axes.iter().zip(&point.0).map(|(axis, choice)| axis.choices[*choice].as_str()).collect()
    }
}
