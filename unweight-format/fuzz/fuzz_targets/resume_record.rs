#![no_main]
//! Records of finished shards from anywhere, and sealed again, as a bug or a hand would.

use libfuzzer_sys::fuzz_target;
use unweight_format::{Digest, testing::is_resume_record};

fuzz_target!(|data: &[u8]| {
    _ = is_resume_record(data);
    let sealed = [Digest::of(data).to_string().as_bytes(), b"\n", data].concat();
    _ = is_resume_record(&sealed);
    // A digest that is not of the text is never believed.
    let mut damaged = sealed;
    damaged[0] = if damaged[0] == b'0' { b'1' } else { b'0' };
    assert!(!is_resume_record(&damaged));
});
