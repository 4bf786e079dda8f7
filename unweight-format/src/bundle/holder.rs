//! The process that holds a lock, as far as the system reports it.

use std::{
    fmt,
    fs::{self, File},
    os::unix::fs::MetadataExt,
};

/// Another process that holds a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Process id and name; unknown for a process in another container or on another machine.
    process: Option<(u32, String)>,
}

impl Holder {
    /// Finds the process that holds the lock of this file.
    pub fn of(file: &File) -> Self {
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        let process = file.metadata().ok().and_then(|metadata| process(&locks, metadata.dev(), metadata.ino()));
        let process = process.map(|process| {
            let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            (process, name.trim().escape_debug().to_string())
        });
        Self { process }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            None => f.write_str("another process"),
            Some((process, _)) if *process == std::process::id() => f.write_str("another run of this process"),
            Some((process, name)) if name.is_empty() => write!(f, "process {process}"),
            Some((process, name)) => write!(f, "process {process} ({name})"),
        }
    }
}

/// Finds the process that locks a whole file in the text of `/proc/locks`. Waiting processes have an arrow.
/// ```text
/// 3: FLOCK  ADVISORY  WRITE 708 08:02:1441831 0 EOF
/// 3: -> FLOCK  ADVISORY  WRITE 714 08:02:1441831 0 EOF
/// ```
fn process(locks: &str, dev: u64, ino: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{ino}", libc::major(dev), libc::minor(dev));
    let of = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [_, "FLOCK", _, _, process, locked, ..] if locked == file => process.parse().ok(),
        _ => None,
    };
    // 0: a process in another container.
    locks.lines().find_map(of).filter(|process| *process > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_holder_is_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 08:02:11 0 EOF\n2: -> FLOCK  ADVISORY  WRITE 8 08:02:11 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 9 08:02:12 0 EOF\n4: FLOCK  ADVISORY  WRITE 10 fd:1a:11 0 EOF\n\
                     5: FLOCK  ADVISORY  WRITE 11 08:02:11 0 EOF\n6: FLOCK  ADVISORY  WRITE 0 08:02:13 0 EOF\n7:\n";
        let of = |major, minor, ino| process(locks, libc::makedev(major, minor), ino);
        assert_eq!((of(8, 2, 11), of(8, 2, 12), of(0xfd, 0x1a, 11)), (Some(11), Some(9), Some(10)));
        assert_eq!((of(8, 2, 13), of(8, 2, 1), process("", 0, 0)), (None, None, None));
        let text = |process: Option<(u32, &str)>| {
            Holder { process: process.map(|(process, name)| (process, name.to_owned())) }.to_string()
        };
        assert_eq!(
            [text(Some((9, "cat"))), text(Some((9, ""))), text(None)],
            ["process 9 (cat)", "process 9", "another process"]
        );
        assert_eq!(text(Some((std::process::id(), "cat"))), "another run of this process");
    }

    #[test]
    fn lock_of_this_process_is_recognised() {
        let file = tempfile::tempfile().unwrap();
        file.lock().unwrap();
        let holder = Holder::of(&file);
        // On some file systems /proc/locks has other device numbers than the file; then the holder is unknown.
        assert!(holder.process.as_ref().is_none_or(|(process, _)| *process == std::process::id()), "{holder}");
    }
}
