//! Progress on stderr, and the signals that end it.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use unweight::format::bundle::Progress;

use super::{
    failure::{Failure, Result},
    output::{Output, printable},
};

/// A bar on a terminal; without one, nothing but what `-v` asks for.
pub struct Bar {
    bar: ProgressBar,
    cancelled: Arc<AtomicBool>,
    output: Output,
}

impl Bar {
    /// A bar labelled with what is being done. From here on SIGINT, SIGTERM and SIGHUP ask the work to stop.
    pub fn new(output: Output, label: &'static str) -> Result<Self> {
        // Drawn from `start` on: before that there is no total, and a bar of nothing is a full one.
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden()).with_prefix(label);
        let template = "{prefix} [{bar:30}] {bytes}/{total_bytes}  {bytes_per_sec}  ETA {left}  {wide_msg}";
        // The first files are no measure of the rest.
        let left = |state: &ProgressState, text: &mut dyn fmt::Write| {
            let known = state.elapsed() > Duration::from_secs(2) && state.pos() > 0;
            // A bar that cannot be written is not drawn.
            let _ = if known { write!(text, "{:#}", HumanDuration(state.eta())) } else { text.write_str("-") };
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let style = style.with_key("left", left);
        bar.set_style(style.progress_chars("=> "));
        Ok(Self { bar, cancelled: cancel_flag()?, output })
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Progress for Bar {
    fn start(&self, total_bytes: u64) {
        self.bar.reset();
        self.bar.set_length(total_bytes);
        if !self.output.quiet {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
    }

    fn file(&self, name: &str) {
        if self.output.verbose > 0 {
            self.bar.suspend(|| self.output.note(name));
        }
    }

    fn tensor(&self, name: &str) {
        if self.output.verbose > 1 {
            self.bar.suspend(|| self.output.note(format_args!("  {name}")));
        }
        self.bar.set_message(printable(name).into_owned());
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

const SIGNALS: [i32; 3] = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
static SIGNAL: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// The signal that asked to stop, if any.
pub fn signal() -> Option<u8> {
    SIGNAL.get().and_then(|signal| u8::try_from(signal.load(Ordering::Relaxed)).ok()).filter(|&signal| signal > 0)
}

/// A write beyond the limit of file sizes is to fail like one on a full disk, not to end the process.
pub fn survive_file_limit() {
    let unused = Arc::new(AtomicBool::new(false));
    // Without a handler the default stays: the process ends, and nothing half-written has a final name.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, unused);
}

/// Set by the first of [`SIGNALS`]; the second one ends the process at once.
pub fn cancel_flag() -> Result<Arc<AtomicBool>> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(flag) = FLAG.get() {
        return Ok(Arc::clone(flag));
    }
    let flag = Arc::new(AtomicBool::new(false));
    let number = SIGNAL.get_or_init(Arc::default);
    for signal in SIGNALS {
        // Handlers run in the order of registration: the flag must be looked at before it is set.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register_usize(signal, Arc::clone(number), signal as usize))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .map_err(Failure::io("cannot listen to signals"))?;
    }
    Ok(Arc::clone(FLAG.get_or_init(|| flag)))
}
