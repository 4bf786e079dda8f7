//! Keys of measurements.

use unweight_codegen::{catalog_digest, spec::Arch};
use unweight_format::Digest;

/// The model, batch and device that a measurement is valid for. [`Subject::key`] is the only source of keys, for
/// writers and readers of measurements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject<'a> {
    /// The digest of the bundle's manifest with the placement, or the name of a geometry with random weights.
    pub model: &'a str,
    /// The number of rows of a step.
    pub batch: u32,
    /// The number of tokens of a sequence.
    pub context: u32,
    /// The architecture that kernels are compiled for.
    pub arch: Arch,
    /// The name of the device, as its driver reports it.
    pub device: &'a str,
    /// The number of its multiprocessors.
    pub sms: u32,
    /// The major version of CUDA that the driver supports, such as 13.
    pub driver: u32,
    /// The way of measuring; `None` for keys of saved plans, which do not depend on it.
    pub how: Option<How<'a>>,
}

/// The way of measuring: everything that changes a step's time and is not part of [`Subject`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct How<'a> {
    /// Rounds per comparison and steps per round.
    pub rounds: (u32, u32),
    /// The limit of device memory in bytes, if one was given.
    pub memory: Option<u64>,
    /// The measured table that dispatch uses, as text.
    pub table: &'a str,
}

impl Subject<'_> {
    /// The key of this subject's measurements, 32 hexadecimal digits. It changes with the version of this crate and
    /// with every byte of the kernel sources.
    ///
    /// ```
    /// use unweight_codegen::spec::Arch;
    /// use unweight_engine::raw::pipelines::tune::Subject;
    /// let (arch, device) = (Arch::Sm90a, "NVIDIA H200");
    /// let (sms, driver, how) = (132, 13, None);
    /// let subject = Subject { model: "llama-3.1-8b", batch: 1, context: 1024, arch, device, sms, driver, how };
    /// assert_eq!(subject.key(), subject.key());
    /// assert_ne!(subject.key(), Subject { batch: 8, ..subject.clone() }.key());
    /// ```
    pub fn key(&self) -> String {
        self.key_with(catalog_digest(self.arch))
    }

    /// The part of the key that does not depend on driver, batch and way of measuring: a digest of this crate's
    /// version, the model and the kernel sources, 32 hexadecimal digits. Measurements on the same device with another
    /// basis are obsolete.
    pub fn basis(&self) -> String {
        let kernels = catalog_digest(self.arch);
        let text = format!("{} {kernels} {}", env!("CARGO_PKG_VERSION"), self.model);
        Digest::of(text.as_bytes()).to_string()
    }

    fn key_with(&self, kernels: Digest) -> String {
        let Self { model, batch, context, arch, device, sms, driver, how } = self;
        let mut text = String::new();
        // Lengths precede texts, so that no two subjects have the same text.
        for part in [env!("CARGO_PKG_VERSION"), model, device] {
            text += &format!("{}:{part}\n", part.len());
        }
        text += &format!("{batch} {context} {arch:?} {sms} {driver}\n");
        if let Some(How { rounds: (rounds, steps), memory, table }) = how {
            text += &format!("{rounds} {steps} {memory:?}\n{}:{table}\n", table.len());
        }
        text += &kernels.to_string();
        Digest::of(text.as_bytes()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuning_key_covers_every_dependency() {
        let how = How { rounds: (7, 4), memory: None, table: "{}" };
        let (arch, driver) = (Arch::Sm90a, 4);
        let subject =
            Subject { model: "m", batch: 1, context: 2, arch, device: "d", sms: 3, driver, how: Some(how.clone()) };
        let of = |how: How<'static>| Subject { how: Some(how), ..subject.clone() };
        let others = [
            Subject { how: None, ..subject.clone() },
            of(How { rounds: (5, 4), ..how.clone() }),
            of(How { rounds: (7, 5), ..how.clone() }),
            of(How { memory: Some(0), ..how.clone() }),
            of(How { memory: Some(1 << 30), ..how.clone() }),
            of(How { table: "{ }", ..how.clone() }),
            Subject { model: "n", ..subject.clone() },
            Subject { batch: 2, ..subject.clone() },
            Subject { context: 3, ..subject.clone() },
            Subject { arch: Arch::Sm80, ..subject.clone() },
            Subject { device: "e", ..subject.clone() },
            Subject { sms: 4, ..subject.clone() },
            Subject { driver: 5, ..subject.clone() },
            Subject { model: "md", device: "", ..subject.clone() },
            Subject { batch: 12, context: 0, ..subject.clone() },
        ];
        let mut keys: Vec<String> = others.iter().chain([&subject]).map(Subject::key).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), others.len() + 1);
        // Other kernels with the same names.
        let [old, new] = ["old", "new"].map(|text| subject.key_with(Digest::of(text.as_bytes())));
        assert!(old != new && !keys.contains(&old) && keys.contains(&subject.key_with(catalog_digest(arch))));
    }
}
