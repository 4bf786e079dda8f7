#![no_main]
//! Arbitrary records of finished shards, with their own or a correct digest, as after a bug or an edit.

use libfuzzer_sys::fuzz_target;
use unweight_format::{Digest, testing::is_resume_record};

fuzz_target!(|data: &[u8]| {
    _ = is_resume_record(data);
    let sealed = [Digest::of(data).to_string().as_bytes(), b"\n", data].concat();
    _ = is_resume_record(&sealed);
    // A record with a wrong digest is always refused.
    let mut damaged = sealed;
    damaged[0] = if damaged[0] == b'0' { b'1' } else { b'0' };
    assert!(!is_resume_record(&damaged));
});
