//! Maps settings to coordinates and points of [`tune`](super::tune).

use super::{
    Choices, Setting,
    tune::{Axis, Coordinate, Point, Profile, Space},
};
use crate::options::Projection;

/// Numbers of decoding multiprocessors that a search tries, from the report's sixth on.
const DECODE_SMS: [u32; 8] = [22, 3, 8, 16, 32, 48, 64, 96];

/// All settings that a search can choose for a step, the default choice of each axis first.
#[derive(Clone, Debug)]
pub struct SettingSpace {
    space: Space,
    guess: Setting,
}

impl SettingSpace {
    /// The space of these variants on a device of `sms` multiprocessors. `guess` provides the values that have no axis.
    pub fn new(choices: &Choices, guess: &Setting, sms: u32) -> Self {
        let mut axes = Vec::new();
        for (profile, variants) in Profile::ALL.into_iter().zip(choices) {
            for (projection, variants) in Projection::ALL.into_iter().zip(variants) {
                if !variants.is_empty() {
                    let choices = variants.iter().map(ToString::to_string).collect();
                    axes.push(Axis { coordinate: Coordinate::Pipeline(profile, projection), choices });
                }
            }
        }
        if choices[0].iter().any(|variants| !variants.is_empty()) {
            let mut counts = vec![guess.decode_sms];
            counts.extend(DECODE_SMS.into_iter().filter(|count| *count < sms && *count != guess.decode_sms));
            let choices = counts.iter().map(ToString::to_string).collect();
            axes.push(Axis { coordinate: Coordinate::DecodeSms, choices });
            let choices = ["2", "1"].map(str::to_owned).to_vec();
            axes.push(Axis { coordinate: Coordinate::Consumers, choices });
        }
        // The variants of a weight differ, and no coordinate repeats.
        let space = Space::new(axes).unwrap_or_default();
        Self { space, guess: guess.clone() }
    }

    /// The axes of the search.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Whether every axis has a single choice.
    pub fn is_trivial(&self) -> bool {
        self.space.axes().iter().all(|axis| axis.choices.len() == 1)
    }

    /// The setting of a point.
    pub fn setting(&self, point: &Point) -> Setting {
        let mut setting = self.guess.clone();
        for (axis, name) in self.space.axes().iter().zip(self.space.names(point)) {
            match axis.coordinate {
                Coordinate::Pipeline(profile, projection) => {
                    let variants = if profile == Profile::Hard { &mut setting.hard } else { &mut setting.easy };
                    let variant = &mut variants[projection as usize];
                    *variant = name.parse().unwrap_or(*variant);
                }
                Coordinate::DecodeSms => setting.decode_sms = name.parse().unwrap_or(setting.decode_sms),
                Coordinate::Consumers => setting.consumers = name.parse().unwrap_or(setting.consumers),
            }
        }
        setting
    }

    /// The point of a setting. A value that an axis does not have becomes the first choice of that axis.
    pub fn point(&self, setting: &Setting) -> Point {
        let names = self.space.axes().iter().map(|axis| {
            let name = match axis.coordinate {
                Coordinate::Pipeline(profile, projection) => {
                    let variants = if profile == Profile::Hard { &setting.hard } else { &setting.easy };
                    variants[projection as usize].to_string()
                }
                Coordinate::DecodeSms => setting.decode_sms.to_string(),
                Coordinate::Consumers => setting.consumers.to_string(),
            };
            let choice = axis.choices.iter().find(|choice| **choice == name).or(axis.choices.first());
            choice.cloned().unwrap_or_default()
        });
        self.space.point(&names.collect::<Vec<_>>()).unwrap_or_else(|_| self.space.first())
    }
}
