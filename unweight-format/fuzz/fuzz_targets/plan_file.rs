#![no_main]
//! Arbitrary plan files, and arbitrary patterns and names.

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use unweight_format::{bundle::PlanFile, raw::glob::matches};

/// The obvious matcher, which is exponential and correct.
fn obvious(pattern: &[char], name: &[char]) -> bool {
    match (pattern.first(), name.first()) {
        (None, None) => true,
        (Some('*'), _) => obvious(&pattern[1..], name) || !name.is_empty() && obvious(pattern, &name[1..]),
        (Some('?'), Some(_)) => obvious(&pattern[1..], &name[1..]),
        (Some(p), Some(n)) if p == n => obvious(&pattern[1..], &name[1..]),
        _ => false,
    }
}

fuzz_target!(|data: &[u8]| {
    if let Ok(plan) = PlanFile::parse(data, Path::new("plan.json")) {
        for rule in &plan.rules {
            _ = matches(&rule.pattern, "model.layers.0.mlp.up_proj.weight");
        }
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (pattern, name) = text.split_once('\n').unwrap_or((text, "a.b"));
    if pattern.len() <= 12 && name.len() <= 16 {
        let chars = |text: &str| text.chars().collect::<Vec<_>>();
        assert_eq!(matches(pattern, name), obvious(&chars(pattern), &chars(name)));
    } else {
        _ = matches(pattern, name);
    }
});
