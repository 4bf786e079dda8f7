//! For what a measurement holds.

use unweight_codegen::{catalog_digest, spec::Arch};
use unweight_format::Digest;

/// What is measured, where. Whoever writes measurements and whoever reads them call [`Subject::key`]: there is no other
/// way to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject<'a> {
    /// The digest of the bundle's manifest with the placement, or the name of a geometry with random weights.
    pub model: &'a str,
    /// Rows of a step.
    pub batch: u32,
    /// Tokens of a sequence.
    pub context: u32,
    /// The architecture that kernels are compiled for.
    pub arch: Arch,
    /// The device's name, as its driver says it.
    pub device: &'a str,
    /// Its multiprocessors.
    pub sms: u32,
    /// The major version of CUDA that the driver supports, such as 13.
    pub driver: u32,
    /// How steps are measured; `None` where that does not matter, as for a plan that was found.
    pub how: Option<How<'a>>,
}

/// What is measured with, beside the step itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct How<'a> {
    /// Rounds of a comparison, and steps of a round.
    pub rounds: (u32, u32),
    /// Bytes of device memory for everything, where they were said.
    pub memory: Option<u64>,
    /// The table that chooses matmuls, as text.
    pub table: &'a str,
}

impl Subject<'_> {
    /// Names the measurements of this subject: 32 hexadecimal digits. Another version of this crate, or a letter in
    /// what a kernel is compiled from, has another.
    ///
    /// ```
    /// use unweight_codegen::spec::Arch;
    /// use unweight_engine::pipelines::tune::Subject;
    /// let (arch, device) = (Arch::Sm90a, "NVIDIA H200");
    /// let (sms, driver, how) = (132, 13, None);
    /// let subject = Subject { model: "llama-3.1-8b", batch: 1, context: 1024, arch, device, sms, driver, how };
    /// assert_eq!(subject.key(), subject.key());
    /// assert_ne!(subject.key(), Subject { batch: 8, ..subject.clone() }.key());
    /// ```
    pub fn key(&self) -> String {
        self.key_with(catalog_digest(self.arch))
    }

    /// What of this subject no other driver, batch or way of measuring changes: 32 hexadecimal digits of this crate's
    /// version, the model and what kernels are compiled from. What was measured on the device of another basis,
    /// nothing asks for any more.
    pub fn basis(&self) -> String {
        let kernels = catalog_digest(self.arch);
        let text = format!("{} {kernels} {}", env!("CARGO_PKG_VERSION"), self.model);
        Digest::of(text.as_bytes()).to_string()
    }

    fn key_with(&self, kernels: Digest) -> String {
        let Self { model, batch, context, arch, device, sms, driver, how } = self;
        let mut text = String::new();
        // Lengths before texts, so that no two subjects have one text.
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
        // Other kernels of the same names.
        let [old, new] = ["old", "new"].map(|text| subject.key_with(Digest::of(text.as_bytes())));
        assert!(old != new && !keys.contains(&old) && keys.contains(&subject.key_with(catalog_digest(arch))));
    }
}
