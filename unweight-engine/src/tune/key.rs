//! For what a measurement holds.

use unweight_codegen::spec::{Arch, catalog};
use unweight_format::digest::Digest;

/// What is measured, where. Whoever writes measurements and whoever reads them call [`Subject::key`]: there is no other
/// way to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject<'a> {
    /// The digest of the bundle's manifest, or the name of a geometry with random weights.
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
    /// The driver's major version, such as 580.
    pub driver: u32,
}

impl Subject<'_> {
    /// Names the measurements of this subject: 32 hexadecimal digits. Another version of this crate or another
    /// catalogue of kernels has another.
    ///
    /// ```
    /// use unweight_codegen::spec::Arch;
    /// use unweight_engine::tune::Subject;
    /// let (arch, device) = (Arch::Sm90a, "NVIDIA H200");
    /// let subject = Subject { model: "llama-3.1-8b", batch: 1, context: 1024, arch, device, sms: 132, driver: 580 };
    /// assert_eq!(subject.key(), subject.key());
    /// assert_ne!(subject.key(), Subject { batch: 8, ..subject.clone() }.key());
    /// ```
    pub fn key(&self) -> String {
        let Self { model, batch, context, arch, device, sms, driver } = self;
        let mut text = String::new();
        // Lengths before texts, so that no two subjects have one text.
        for part in [env!("CARGO_PKG_VERSION"), model, device] {
            text += &format!("{}:{part}\n", part.len());
        }
        text += &format!("{batch} {context} {arch:?} {sms} {driver}\n");
        let mut names: Vec<String> = catalog::all(*arch).iter().map(ToString::to_string).collect();
        names.sort_unstable();
        text += &names.join("\n");
        Digest::of(text.as_bytes()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_a_measurement_depends_on_is_in_its_key() {
        let subject = Subject { model: "m", batch: 1, context: 2, arch: Arch::Sm90a, device: "d", sms: 3, driver: 4 };
        let others = [
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
    }
}
