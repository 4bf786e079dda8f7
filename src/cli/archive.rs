//! Tar archives of models and bundles on stdin and stdout.

use std::{
    fs::{self, File, FileTimes, Permissions},
    io::{self, IsTerminal, Read, Write},
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::{Component, Path, PathBuf},
    time::{Duration, SystemTime},
};

use tar::{Archive, Builder, Entry, EntryType, Header};
use unweight::format::bundle::{
    Bundle, BundleError, DecompressOptions, Progress,
    manifest::{FILE_NAME, FileEntry, SIGNATURE_NAME},
};

use super::failure::{Failure, Result};

/// Whether the path is `-`, which means stdin or stdout.
pub fn is_stream(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Returns unbuffered stdout for binary data. Fails if stdout is a terminal.
pub fn stdout() -> Result<File> {
    let stdout = io::stdout();
    if stdout.is_terminal() {
        return Err(Failure::new(
            "usage",
            "stdout is a terminal",
            "redirect it, or give -o the name of a file or directory",
        ));
    }
    Ok(File::from(stdout.as_fd().try_clone_to_owned()?))
}

/// The maximum size of an extension record: a long name, a long link or PAX attributes. Bytes.
const EXTENSION_MAX: u64 = 1 << 20;
/// Size of a tar header, bytes.
const HEADER_BYTES: usize = 512;

/// Compressed formats: leading bytes, name, and the program that decompresses them.
const COMPRESSED: [(&[u8], &str, &str); 4] = [
    (b"\x1f\x8b", "gzip", "gzip -dc"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"),
    (b"\xfd7zXZ\0", "xz", "xz -dc"),
    (b"BZh", "bzip2", "bzip2 -dc"),
];

/// A reader that records whether the input ended, and rejects extension records that are too large for memory.
struct TarReader<R> {
    inner: R,
    ended: bool,
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut read = self.inner.read(buffer)?;
        // The tar crate reads headers, and hardly anything else, in blocks of this size.
        if buffer.len() == HEADER_BYTES {
            while read > 0 && read < HEADER_BYTES {
                match self.inner.read(&mut buffer[read..])? {
                    0 => break,
                    more => read += more,
                }
            }
            check_extension(&buffer[..read])?;
        }
        self.ended |= read == 0 && !buffer.is_empty();
        Ok(read)
    }
}

/// Rejects a header whose name or attributes are too long.
fn check_extension(block: &[u8]) -> io::Result<()> {
    let Ok(block) = <&[u8; HEADER_BYTES]>::try_from(block) else { return Ok(()) };
    let header = Header::from_byte_slice(block);
    let kinds = [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader, EntryType::XGlobalHeader];
    match header.entry_size() {
        Ok(bytes) if kinds.contains(&header.entry_type()) && bytes > EXTENSION_MAX => {
            let message = format!("a name or attributes of {bytes} bytes, above the limit of {EXTENSION_MAX}");
            Err(io::Error::new(io::ErrorKind::InvalidData, message))
        }
        _ => Ok(()),
    }
}

/// Unpacks the archive on stdin into the new directory `into`. Returns the directory of its files: `into`, or its only
/// subdirectory.
pub fn unpack_stdin(into: &Path, progress: &dyn Progress) -> Result<PathBuf> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Failure::new(
            "usage",
            "stdin is a terminal",
            "pipe a tar archive into it: tar -c -C MODEL . | unweight ...",
        ));
    }
    unpack(stdin.lock(), into, progress)
}

fn unpack(mut input: impl Read, into: &Path, progress: &dyn Progress) -> Result<PathBuf> {
    fs::create_dir(into).map_err(Failure::io(into.display()))?;
    let help = || "fetch or make the archive again; it must be an uncompressed tar archive";
    let read_error = |error: io::Error| Failure::new("archive-invalid", format!("archive on stdin: {error}"), help());
    let mut first = Vec::new();
    input.by_ref().take(HEADER_BYTES as u64).read_to_end(&mut first).map_err(read_error)?;
    if let Some((_, kind, decoder)) = COMPRESSED.iter().find(|(magic, ..)| first.starts_with(magic)) {
        return Err(Failure::new(
            "archive-invalid",
            format!("archive on stdin: {kind} data, not a tar archive"),
            format!("decompress it first: {decoder} FILE | unweight ..."),
        ));
    }
    if !may_be_tar(&first) {
        return Err(Failure::new("archive-invalid", "archive on stdin: not a tar archive", help()));
    }
    let mut archive = Archive::new(TarReader { inner: first.as_slice().chain(input), ended: false });
    let mut files = 0u64;
    for entry in archive.entries().map_err(read_error)? {
        files += unpack_entry(&mut entry.map_err(read_error)?, into, progress)?;
    }
    let mut source = archive.into_inner();
    // An archive ends with a marker. Without it, the writer did not finish.
    if source.ended || files == 0 {
        let message = if files == 0 { "it has no files, or is not a tar archive" } else { "it is truncated" };
        return Err(Failure::new("archive-invalid", format!("archive on stdin: {message}"), help()));
    }
    // Read the padding of the last record, so that the writer can finish.
    io::copy(&mut source, &mut io::sink()).map_err(read_error)?;
    let mut top = fs::read_dir(into).map_err(Failure::io(into.display()))?.flatten();
    Ok(match (top.next(), top.next()) {
        (Some(only), None) if only.path().is_dir() => only.path(),
        _ => into.to_path_buf(),
    })
}

/// Returns whether an archive may begin with these bytes. Nothing, or zeros only, is an archive without files.
fn may_be_tar(first: &[u8]) -> bool {
    match <&[u8; HEADER_BYTES]>::try_from(first) {
        Ok(block) => block.iter().all(|byte| *byte == 0) || Header::from_byte_slice(block).cksum().is_ok(),
        Err(_) => first.is_empty(),
    }
}

/// Unpacks a file or a directory and returns the number of files. Rejects everything else: a link could point
/// elsewhere.
fn unpack_entry(entry: &mut Entry<'_, impl Read>, into: &Path, progress: &dyn Progress) -> Result<u64> {
    let bytes = entry.path_bytes().into_owned();
    let name = String::from_utf8_lossy(&bytes).into_owned();
    let invalid = |why: &str| {
        let message = format!("archive on stdin: '{name}': {why}");
        Failure::new("archive-invalid", message, "make an archive of plain files with relative names")
    };
    let reject = |why: &str| Err(invalid(why));
    let damaged = |why: String| {
        Failure::new("archive-invalid", format!("archive on stdin: '{name}': {why}"), "fetch or make the archive again")
    };
    let kind = entry.header().entry_type();
    if kind == EntryType::XGlobalHeader {
        return Ok(0);
    }
    if name.as_bytes() != bytes {
        return reject("its name is not UTF-8");
    }
    let mut path = into.to_path_buf();
    for part in Path::new(&name).components() {
        match part {
            Component::CurDir => {}
            Component::Normal(part) => path.push(part),
            _ => return reject("its name leads out of the archive"),
        }
    }
    if !has_sound_size(entry) {
        return reject("its size or another extended attribute cannot be read");
    }
    let write_error = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
            invalid("another entry has this name or is in it")
        }
        io::ErrorKind::InvalidFilename => invalid("its name is too long for the file system"),
        _ => Failure::io(format_args!("archive on stdin: '{name}': cannot unpack it to {}", into.display()))(error),
    };
    match kind {
        EntryType::Directory => {
            fs::create_dir_all(&path).map_err(write_error)?;
            return Ok(0);
        }
        EntryType::Regular | EntryType::Continuous => {}
        EntryType::Symlink | EntryType::Link => return reject("it is a link; archive its target instead (tar -h)"),
        _ => return reject("it is neither a file nor a directory"),
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(write_error)?;
    }
    let mut file = match File::create_new(&path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return reject("it occurs twice in the archive"),
        other => other.map_err(write_error)?,
    };
    let (mut piece, mut done) = (vec![0; 1 << 20], 0);
    loop {
        if progress.cancelled() {
            return Err(BundleError::Cancelled.into());
        }
        let read = entry.read(&mut piece).map_err(|error| damaged(error.to_string()))?;
        if read == 0 {
            break;
        }
        file.write_all(&piece[..read]).map_err(write_error)?;
        done += read as u64;
    }
    if done != entry.size() {
        return Err(damaged("it is truncated".to_owned()));
    }
    // Times and modes are kept where the file system allows it; failures are ignored.
    let modified = entry.header().mtime().ok().map(Duration::from_secs);
    if let Some(modified) = modified.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since)) {
        let _ = file.set_times(FileTimes::new().set_modified(modified));
    }
    let mode = entry.header().mode().unwrap_or(0o644) & 0o777 | 0o600;
    let _ = file.set_permissions(Permissions::from_mode(mode));
    Ok(1)
}

/// Returns false if an extended header cannot be read, or states a size of 2^64 or more, which the tar crate would
/// ignore.
fn has_sound_size(entry: &mut Entry<'_, impl Read>) -> bool {
    let Ok(Some(extensions)) = entry.pax_extensions() else { return true };
    extensions.into_iter().all(|extension| match extension {
        Ok(extension) if extension.key_bytes() == b"size" => {
            extension.value().is_ok_and(|value| value.parse::<u64>().is_ok())
        }
        // A malformed record could state anything.
        other => other.is_ok(),
    })
}

/// Writes a bundle as a tar archive, its manifest first.
pub fn pack_bundle(dir: &Path, out: &mut File) -> Result<()> {
    let bundle = Bundle::open_without_base(dir)?;
    let mut builder = Builder::new(out);
    let stored = bundle.manifest().files.iter().flat_map(FileEntry::stored).map(|(name, _)| name);
    let signature = dir.join(SIGNATURE_NAME).exists().then(|| SIGNATURE_NAME.to_owned());
    for name in std::iter::once(FILE_NAME.to_owned()).chain(signature).chain(stored) {
        let path = dir.join(&name);
        let mut file = File::open(&path).map_err(Failure::io(path.display()))?;
        let bytes = file.metadata().map_err(Failure::io(path.display()))?.len();
        builder.append_data(&mut header(&path, bytes)?, &name, &mut file)?;
    }
    Ok(builder.into_inner()?.flush()?)
}

/// Writes the original files of a bundle as a tar archive. Returns the number of files and of bytes.
pub fn pack_originals(
    dir: &Path,
    out: &mut File,
    options: &DecompressOptions,
    progress: &dyn Progress,
) -> Result<(usize, u64)> {
    let bundle = Bundle::open_with_base(dir, options.base.as_deref())?;
    let files = &bundle.manifest().files;
    let total = files.iter().map(FileEntry::size).sum();
    progress.start(total);
    let mut builder = Builder::new(out);
    for file in files {
        // A rewritten file is stored together with its original.
        let stored = file.original().map_or_else(|| dir.join(file.name()), |original| dir.join(original));
        // The contents are written in pieces; there is no reader to pass to `append_data`.
        builder.append_data(&mut header(&stored, file.size())?, file.name(), io::empty())?;
        bundle.write_file(file.name(), builder.get_mut(), options, progress)?;
        let rest = file.size().next_multiple_of(512) - file.size();
        builder.get_mut().write_all(&vec![0; rest as usize])?;
    }
    builder.into_inner()?.flush()?;
    Ok((files.len(), total))
}

/// Returns a header with the mode and time of `file` and the given size; the owner is root.
fn header(file: &Path, bytes: u64) -> Result<Header> {
    let metadata = file.metadata().map_err(Failure::io(file.display()))?;
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_size(bytes);
    header.set_mode(metadata.mode() & 0o777);
    header.set_mtime(u64::try_from(metadata.mtime()).unwrap_or(0));
    header.set_uid(0);
    header.set_gid(0);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use unweight::format::bundle::Silent;

    use super::*;

    /// Returns an archive of files with these names, and the entries that `more` appends.
    fn archive(names: &[&str], more: impl FnOnce(&mut Builder<Vec<u8>>)) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for name in names {
            let mut header = Header::new_gnu();
            header.set_size(5);
            header.set_mode(0o644);
            // Set by hand: the tar crate refuses to write names that must be rejected.
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            builder.append(&header, &b"bytes"[..]).unwrap();
        }
        more(&mut builder);
        builder.into_inner().unwrap()
    }

    fn unpacked(bytes: &[u8]) -> std::result::Result<Vec<String>, String> {
        let home = tempfile::tempdir().unwrap();
        let root = unpack(bytes, &home.path().join("in"), &Silent).map_err(|failure| failure.to_string());
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1, "nothing outside");
        let mut names: Vec<String> =
            fs::read_dir(root?).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        Ok(names)
    }

    #[test]
    fn single_top_directory_is_the_root() {
        assert_eq!(unpacked(&archive(&["./a", "b"], |_| ())).unwrap(), ["a", "b"]);
        assert_eq!(unpacked(&archive(&["model/a", "model/sub/b"], |_| ())).unwrap(), ["a", "sub"]);
        assert_eq!(unpacked(&archive(&["model/a", "other/b"], |_| ())).unwrap(), ["model", "other"]);
    }

    #[test]
    fn links_and_truncated_archives_are_rejected() {
        for name in ["../a", "/etc/a", "a/../../b"] {
            assert!(unpacked(&archive(&[name], |_| ())).unwrap_err().contains("leads out"), "{name}");
        }
        assert!(unpacked(&archive(&["a", "./a"], |_| ())).unwrap_err().contains("twice"));
        for (kind, why) in [
            (EntryType::Symlink, "a link"),
            (EntryType::Link, "a link"),
            (EntryType::Fifo, "neither"),
            (EntryType::Char, "neither"),
        ] {
            let odd = archive(&["a"], |builder| {
                let mut header = Header::new_gnu();
                header.set_entry_type(kind);
                header.set_size(0);
                header.set_path("odd").unwrap();
                header.set_link_name("/etc/passwd").unwrap();
                header.set_cksum();
                builder.append(&header, io::empty()).unwrap();
            });
            assert!(unpacked(&odd).unwrap_err().contains(why), "{kind:?}");
        }
        let named = |name: &[u8], mtime: u64| {
            archive(&["a"], |builder| {
                let mut header = Header::new_gnu();
                header.set_size(5);
                header.set_mode(0o644);
                header.set_mtime(mtime);
                header.as_mut_bytes()[..name.len()].copy_from_slice(name);
                header.set_cksum();
                builder.append(&header, &b"bytes"[..]).unwrap();
            })
        };
        assert!(unpacked(&named(b"a\xffb", 0)).unwrap_err().contains("UTF-8"));
        // Times out of range are not kept.
        for mtime in [1 << 40, 1 << 63, u64::MAX] {
            assert_eq!(unpacked(&named(b"late", mtime)).unwrap(), ["a", "late"], "{mtime}");
        }
        // A name of several GiB whose bytes all arrive.
        for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader, EntryType::XGlobalHeader] {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(64 << 30);
            header.set_path("long").unwrap();
            header.set_cksum();
            let endless = header.as_bytes().chain(io::repeat(b'a'));
            let home = tempfile::tempdir().unwrap();
            let error = unpack(endless, &home.path().join("in"), &Silent).unwrap_err();
            let texts = format!("{error} {:?}", std::error::Error::source(&error));
            assert!(texts.contains("above the limit"), "{kind:?}: {texts}");
        }
        // A long name within the limit.
        let long = "d/".repeat(200) + "file";
        let deep = archive(&["a"], |builder| {
            let mut header = Header::new_gnu();
            header.set_size(5);
            header.set_mode(0o644);
            builder.append_data(&mut header, &long, &b"bytes"[..]).unwrap();
        });
        assert_eq!(unpacked(&deep).unwrap(), ["a", "d"]);
        let whole = archive(&["a", "b"], |_| ());
        // Cut in a header, in contents, between files, and before the end marker.
        for bytes in [300, 514, 1024, 1025, 1540, 2048] {
            assert!(unpacked(&whole[..bytes]).is_err(), "{bytes}");
        }
        for bytes in [&b""[..], &[0; 1024], b"no archive at all"] {
            assert!(unpacked(bytes).is_err());
        }
    }
}
