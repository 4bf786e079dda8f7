//! The text form of tuned plans (`docs/format.md` B.10): settings by batch size, each with the key of its measurement.
//! A plan contains names and numbers only, and all of them are checked.

use serde::{Deserialize, Serialize};

use unweight_format::bundle::PLAN_BYTES_MAX;
use unweight_rt::DeviceInfo;

use super::tune::Subject;
use crate::options::{BUCKETS, Measured, PipelineVariant, Placement, Plan, Setting, UnknownVariant};

/// Returns the key under which a setting is valid: a model by the digest of its manifest, a placement, a batch and a
/// device. Pipelines concern only MLPs, which do not depend on the context.
pub fn key(model: &str, placement: Placement, batch: u32, device: &DeviceInfo) -> String {
    let model = format!("{model} {placement}");
    Subject { model: &model, batch, context: 0, ..subject(device) }.key()
}

/// The subject of measurements on this device, with an empty model and batch 0.
pub fn subject(device: &DeviceInfo) -> Subject<'_> {
    let DeviceInfo { arch, name, sms, driver, .. } = device;
    let major: String = driver.chars().take_while(char::is_ascii_digit).collect();
    let driver = major.parse().unwrap_or(0);
    Subject { model: "", batch: 0, context: 0, arch: *arch, device: name, sms: *sms, driver, how: None }
}

/// The version of the text form. Version 1 did not store the device of a setting.
const VERSION: u32 = 2;
/// The maximum number of bytes that a setting adds to a text.
const ROW_BYTES_MAX: usize = 4 << 10;
/// The maximum length of a device name in bytes.
const DEVICE_BYTES_MAX: usize = 512;
/// More multiprocessors than any device has.
const SMS_MAX: u32 = 4096;

/// The reason why a tuned plan cannot be read or extended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The text exceeds the size limit.
    #[error("the tuned plan has {0} bytes, above the limit of {PLAN_BYTES_MAX}; tune the bundle again")]
    TooLarge(usize),
    /// The text is not JSON, or has other fields.
    #[error("not a tuned plan: {0}; tune the bundle again")]
    Json(String),
    /// The plan has an older version.
    #[error("the tuned plan has version {0}, this program reads version {VERSION}; tune the bundle again")]
    Version(u32),
    /// The plan has a newer version.
    #[error(
        "the tuned plan has version {0}, this program reads version {VERSION}; use the newer program that saved it"
    )]
    Newer(u32),
    /// The plan has no room for the settings to be added.
    #[error(
        "the tuned plan has {bytes} bytes and cannot hold {more} more settings; the limit is {PLAN_BYTES_MAX} bytes"
    )]
    Full {
        /// Bytes of the text.
        bytes: usize,
        /// The number of settings to be added.
        more: usize,
    },
    /// A setting does not name a variant of a pipeline.
    #[error("tuned plan, batch {batch}: {source}; tune the bundle again")]
    PipelineVariant {
        /// The batch size of the setting.
        batch: u32,
        /// The parse error.
        source: UnknownVariant,
    },
    /// A value is out of range.
    #[error("tuned plan, batch {batch}: {name} is not {range}; tune the bundle again")]
    Range {
        /// The batch size of the setting.
        batch: u32,
        /// The name of the field.
        name: &'static str,
        /// The allowed values.
        range: &'static str,
    },
    /// The settings are not in ascending order.
    #[error("tuned plan, batch {0}: the settings are not in ascending order; tune the bundle again")]
    Order(u32),
}

impl PlanError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::TooLarge(_) => "tuned-plan-too-large",
            Self::Json(_) | Self::PipelineVariant { .. } | Self::Range { .. } | Self::Order(_) => "tuned-plan-invalid",
            Self::Version(_) | Self::Newer(_) => "tuned-plan-version",
            Self::Full { .. } => "tuned-plan-full",
        }
    }
}

#[derive(Deserialize)]
struct Head {
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    version: u32,
    settings: Vec<Row>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    batch: u32,
    key: String,
    device: String,
    basis: String,
    hard: [String; 3],
    easy: [String; 3],
    decode_sms: u32,
    consumers: u8,
    step_us: f64,
    gain: f64,
}

impl Plan {
    /// Parses the text form.
    ///
    /// # Errors
    /// [`PlanError`] for the first fault.
    pub fn parse(bytes: &[u8]) -> Result<Self, PlanError> {
        if bytes.len() > PLAN_BYTES_MAX {
            return Err(PlanError::TooLarge(bytes.len()));
        }
        // The version is read first, because another version has other fields.
        let json = |error: serde_json::Error| PlanError::Json(error.to_string());
        let Head { version } = serde_json::from_slice(bytes).map_err(json)?;
        match version {
            VERSION => {}
            ..VERSION => return Err(PlanError::Version(version)),
            _ => return Err(PlanError::Newer(version)),
        }
        let text: Text = serde_json::from_slice(bytes).map_err(json)?;
        let mut settings: Vec<Measured> = Vec::new();
        for row in text.settings {
            let measured = row.check()?;
            if settings.last().is_some_and(|last| last.sort_key() >= measured.sort_key()) {
                return Err(PlanError::Order(measured.batch));
            }
            settings.push(measured);
        }
        Ok(Self::of(settings))
    }

    /// Returns the plan that replaces `text` once `more` settings are added. A damaged or older text results in an
    /// empty plan; a newer one is an error, because this program must not replace it.
    ///
    /// # Errors
    /// [`PlanError::Newer`] if a newer program saved the text, [`PlanError::Full`] if it has no room for `more`
    /// settings.
    pub fn to_add_to(text: Option<&str>, more: usize) -> Result<Self, PlanError> {
        let Some(text) = text else { return Ok(Self::default()) };
        match Self::parse(text.as_bytes()) {
            Err(error @ PlanError::Newer(_)) => Err(error),
            Ok(_) if text.len() + more.saturating_mul(ROW_BYTES_MAX) > PLAN_BYTES_MAX => {
                Err(PlanError::Full { bytes: text.len(), more })
            }
            plan => Ok(plan.unwrap_or_default()),
        }
    }

    /// The text form, JSON.
    pub fn text(&self) -> String {
        let settings = self.settings().iter().map(Row::of).collect();
        // Strings and finite numbers are always valid JSON.
        let text = serde_json::to_string_pretty(&Text { version: VERSION, settings });
        text.map(|text| text + "\n").unwrap_or_default()
    }
}

impl Measured {
    /// A setting that was found for a model, by the digest of its manifest, at a placement and a batch on a device.
    pub fn new(
        (model, placement): (&str, Placement),
        batch: u32,
        device: &DeviceInfo,
        setting: Setting,
        (step_us, gain): (f64, f64),
    ) -> Self {
        let basis = Subject { model, ..subject(device) }.basis();
        let DeviceInfo { name, sms, .. } = device;
        let device_name = format!("{name}, {sms} multiprocessors");
        Self { batch, key: key(model, placement, batch, device), device: device_name, basis, setting, step_us, gain }
    }
}

impl Row {
    fn of(measured: &Measured) -> Self {
        let Measured { batch, key, device, basis, setting, step_us, gain } = measured.clone();
        let names = |variants: &[PipelineVariant; 3]| variants.each_ref().map(ToString::to_string);
        let Setting { hard, easy, decode_sms, consumers } = setting;
        let (hard, easy) = (names(&hard), names(&easy));
        Self { batch, key, device, basis, hard, easy, decode_sms, consumers, step_us, gain }
    }

    fn check(self) -> Result<Measured, PlanError> {
        let Self { batch, key, device, basis, hard, easy, decode_sms, consumers, step_us, gain } = self;
        let range = |name, ok, range| if ok { Ok(()) } else { Err(PlanError::Range { batch, name, range }) };
        range("batch", BUCKETS.contains(&batch), "a batch that steps are recorded for")?;
        let digits =
            |text: &str| text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        range("key", digits(&key), "32 hexadecimal digits")?;
        range("basis", digits(&basis), "32 hexadecimal digits")?;
        range("device", (1..=DEVICE_BYTES_MAX).contains(&device.len()), "1 to 512 bytes")?;
        range("decode_sms", (1..=SMS_MAX).contains(&decode_sms), "1 to 4096")?;
        range("consumers", (1..=2).contains(&consumers), "1 or 2")?;
        range("step_us", step_us.is_finite() && step_us > 0.0, "a positive number")?;
        range("gain", gain.is_finite() && gain.abs() <= 1.0, "a number from -1 to 1")?;
        let variants = |[gate, up, down]: [String; 3]| -> Result<[PipelineVariant; 3], PlanError> {
            let variant = |text: String| text.parse().map_err(|source| PlanError::PipelineVariant { batch, source });
            Ok([variant(gate)?, variant(up)?, variant(down)?])
        };
        let setting = Setting { hard: variants(hard)?, easy: variants(easy)?, decode_sms, consumers };
        Ok(Measured { batch, key, device, basis, setting, step_us, gain })
    }
}
