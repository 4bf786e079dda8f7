//! Progress on stderr, and the signals that end it.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use unweight::format::bundle::Progress;

use super::{
    failure::{Failure, Result},
    output::Output,
};

/// A bar on a terminal; without one, nothing but what `-v` asks for.
pub struct Bar {
    bar: ProgressBar,
    cancelled: Arc<AtomicBool>,
    output: Output,
}

impl Bar {
    /// A bar labelled with what is being done. From here on SIGINT and SIGTERM ask the work to stop.
    pub fn new(output: Output, label: &'static str) -> Result<Self> {
        let target = if output.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(0), target).with_prefix(label);
        let template = "{prefix} [{bar:30}] {bytes}/{total_bytes}  {bytes_per_sec}  ETA {eta}  {wide_msg}";
        let style = ProgressStyle::with_template(template).map_err(Failure::other)?;
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
        self.bar.set_message(name.to_owned());
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// Set by the first SIGINT or SIGTERM; the second one ends the process at once.
fn cancel_flag() -> Result<Arc<AtomicBool>> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(flag) = FLAG.get() {
        return Ok(Arc::clone(flag));
    }
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // Handlers run in the order of registration: the flag must be looked at before it is set.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .map_err(Failure::io("cannot listen to signals"))?;
    }
    Ok(Arc::clone(FLAG.get_or_init(|| flag)))
}
