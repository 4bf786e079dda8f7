//! Signal handling: SIGINT, SIGTERM and SIGHUP cancel the work; SIGXFSZ is ignored.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

const SIGNALS: [i32; 3] = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
static SIGNAL: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Returns the signal that cancelled the work, if any.
pub fn signal() -> Option<u8> {
    SIGNAL.get().and_then(|signal| u8::try_from(signal.load(Ordering::Relaxed)).ok()).filter(|&signal| signal > 0)
}

/// Makes a write beyond the file-size limit fail, as on a full disk, instead of ending the process.
pub fn survive_file_limit() {
    let unused = Arc::new(AtomicBool::new(false));
    // Without a handler the default applies: the process ends, and no unfinished file has its final name.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, unused);
}

/// Returns a flag that the first of [`SIGNALS`] sets; a second signal ends the process at once.
pub fn cancel_flag() -> io::Result<Arc<AtomicBool>> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(flag) = FLAG.get() {
        return Ok(Arc::clone(flag));
    }
    let flag = Arc::new(AtomicBool::new(false));
    let number = SIGNAL.get_or_init(Arc::default);
    for signal in SIGNALS {
        // Handlers run in the order of registration: the shutdown must check the flag before it is set.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register_usize(signal, Arc::clone(number), signal as usize))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))?;
    }
    Ok(Arc::clone(FLAG.get_or_init(|| flag)))
}
