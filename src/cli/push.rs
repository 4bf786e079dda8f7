//! `unweight push`: uploads a bundle to the Hub.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use unweight::format::{
    bundle::{
        self, ATTACHED_NAME, Bundle, VerifyOptions,
        manifest::{FILE_NAME, FileEntry, SIGNATURE_NAME},
    },
    raw::{CARD_NAME, CARD_SOURCE_NAME},
};

use super::{
    common::{Ram, Threads},
    failure::{Failure, Result, refuse},
    hub,
    output::{self, Console},
    printable::one_line,
    progress::Bar,
};
use crate::hub::{LocalFile, PushOptions};

/// Files of a bundle's directory that the manifest does not list.
const UNLISTED: [&str; 5] = [FILE_NAME, SIGNATURE_NAME, ATTACHED_NAME, CARD_NAME, CARD_SOURCE_NAME];

/// Arguments of `push`.
#[derive(Args)]
pub struct Push {
    /// Bundle directory
    bundle: PathBuf,
    /// Repository on the Hub: org/name, or org/name@branch
    repository: String,
    /// Make a new repository private
    #[arg(long)]
    private: bool,
    /// Subject of the commit
    #[arg(long, value_name = "TEXT", default_value = "Add bundle")]
    message: String,
    /// Check names, sizes and headers before the upload, not the weights
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    ram: Ram,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Serialize)]
struct Report {
    /// Commit with all files.
    commit: String,
    /// Repository.
    url: String,
    /// Files of the bundle.
    files: u64,
    /// Files it had.
    unchanged_files: u64,
    /// Bytes sent to large-file storage.
    uploaded_bytes: u64,
    /// Whether the repository was created.
    created: bool,
}

impl Push {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let repository = hub::repository(&self.repository)?;
        if self.message.trim().is_empty() {
            return Err(Failure::new("usage", "--message is empty", "give the subject of the commit"));
        }
        let files = files(&self.bundle)?;
        let options = VerifyOptions::default().quick(self.quick).ram_bytes(self.ram.bytes).threads(self.threads.count);
        let bar = Bar::new(console, "verifying")?;
        let verified = bundle::verify_with(&self.bundle, &options, &bar)?;
        bar.finish();
        let problem = verified.problems.iter().find(|problem| !problem.is_extra);
        refuse(problem, "`unweight verify` lists all problems; nothing was uploaded")?;
        for extra in verified.problems.iter().filter(|problem| problem.is_extra) {
            console.note(format_args!("not uploaded: {}", one_line(&extra.file)));
        }
        let card = std::fs::read_to_string(self.bundle.join(CARD_NAME)).unwrap_or_default();
        if !card.contains("library_name: unweight") {
            console.note("note: the bundle has no model card of its own; `unweight card` writes one");
        }
        let bar = Bar::new(console, "uploading")?;
        let client = hub::client()?;
        let options = PushOptions { private: self.private, message: self.message.clone() };
        let pushed = crate::hub::push(&client, &repository, &files, &options, &bar)?;
        bar.finish();
        let report = Report {
            url: format!("{}/{}", client.endpoint(), repository.id),
            commit: pushed.commit,
            files: files.len() as u64,
            unchanged_files: pushed.unchanged,
            uploaded_bytes: pushed.uploaded_bytes,
            created: pushed.created,
        };
        console.summary("push", &report, |out| {
            let (sent, same) = (output::bytes(report.uploaded_bytes), report.unchanged_files);
            writeln!(
                out,
                "{}: {}, {same} unchanged, {sent} uploaded, commit {}",
                report.url,
                output::count(report.files, "file"),
                report.commit
            )
        })
    }
}

/// Returns the files of a bundle; other files of its directory are not uploaded.
fn files(dir: &Path) -> Result<Vec<LocalFile>> {
    let bundle = Bundle::open(dir)?;
    let stored = bundle.manifest().files.iter().flat_map(FileEntry::stored).map(|(name, _)| name);
    let mut names: Vec<String> = stored.collect();
    names.extend(UNLISTED.iter().filter(|name| dir.join(name).is_file()).map(|name| (*name).to_owned()));
    names.sort();
    names.dedup();
    Ok(names.into_iter().map(|name| LocalFile { path: dir.join(&name), name }).collect())
}
