//! Options that `plan`, `compress` and `demo` share: which tensors get which encoding.

use std::path::PathBuf;

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use unweight::format::{
    CodeLimit,
    bundle::{CompressOptions, Profile, Scope, Selection},
};

use super::{common::Threads, completions, source::LocatedModel};

/// Options that decide the encoding of each tensor.
#[derive(Args)]
pub struct Select {
    /// What to optimize for: distribution (small), archive (smallest), packed (12 bits, fastest on a GPU), compact
    /// (small, runs directly up to batch 32), inference (the report's pipelines) or palette
    #[arg(long, value_name = "PROFILE", default_value = "distribution", value_parser = profile,
          add = ArgValueCandidates::new(completions::profiles))]
    profile: Profile,
    /// Tensors to compress: mlp, linear (MLP and attention) or all [default: all, or mlp with --profile inference]
    #[arg(long, value_name = "SCOPE", value_parser = scope,
          add = ArgValueCandidates::new(completions::scopes))]
    scope: Option<Scope>,
    /// Longest Huffman code, 6 to 15 bits; shorter decodes faster, longer compresses better
    #[arg(long, value_name = "BITS", value_parser = code_limit, default_value = "7")]
    code_limit: CodeLimit,
    /// Compress only matching tensors; * and ? are wildcards; repeatable
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Leave matching tensors raw; repeatable
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Leave out matching files and directories next to the weights; repeatable
    #[arg(long, value_name = "GLOB")]
    skip: Vec<String>,
    /// JSON file with an encoding per tensor (docs/reference/plan-files.md)
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
}

impl Select {
    /// Returns options for every profile and every effective code limit. The scope is `--scope` or the profile's
    /// default.
    pub fn all_options(&self, model: &LocatedModel) -> Vec<CompressOptions> {
        let limits = || (0..=32).filter_map(|bits| CodeLimit::new(bits).ok());
        let of = |&profile: &Profile| {
            let options = self.options_for(model).profile(profile);
            let options = options.scope(self.scope.unwrap_or(profile.default_scope()));
            let limits: Vec<CodeLimit> = match profile {
                Profile::Distribution | Profile::Inference => limits().collect(),
                _ => vec![options.code_limit],
            };
            limits.into_iter().map(move |limit| options.clone().code_limit(limit))
        };
        Profile::ALL.iter().flat_map(of).collect()
    }

    /// Returns the library's options for the files of a model.
    pub fn options_for(&self, model: &LocatedModel) -> CompressOptions {
        let options = self.options();
        let selection = model.select(options.selection.clone());
        options.selection(selection)
    }

    /// Returns the library's options.
    pub fn options(&self) -> CompressOptions {
        CompressOptions::new(self.profile)
            .scope(self.scope.unwrap_or(self.profile.default_scope()))
            .code_limit(self.code_limit)
            .include(self.include.clone())
            .exclude(self.exclude.clone())
            .selection(Selection::default().skip(self.skip.clone()))
            .plan_file(self.plan.clone())
            .threads(self.threads.count)
    }
}

pub fn profile(text: &str) -> Result<Profile, String> {
    text.parse().map_err(|error: unweight::format::UnknownName| error.to_string())
}

fn scope(text: &str) -> Result<Scope, String> {
    text.parse().map_err(|error: unweight::format::UnknownName| error.to_string())
}

fn code_limit(text: &str) -> Result<CodeLimit, String> {
    let bits: u32 = text.parse().map_err(|_| "write a number from 6 to 15".to_owned())?;
    CodeLimit::new(bits).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_code_limit_is_that_of_the_library() {
        let command = Select::augment_args(clap::Command::new("select"));
        let matches = command.try_get_matches_from(["select"]).unwrap();
        assert_eq!(matches.get_one("code_limit"), Some(&CodeLimit::DEFAULT));
    }
}
