//! A progress bar on stderr.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use unweight::format::bundle::Progress;

use super::{
    failure::{Failure, Result},
    output::Console,
    printable::printable,
    signals,
};

/// A progress bar. If stderr is not a terminal, it prints only what `-v` requests.
pub struct Bar {
    bar: ProgressBar,
    cancelled: Arc<AtomicBool>,
    console: Console,
}

impl Bar {
    /// Creates a bar with a label. From here on SIGINT, SIGTERM and SIGHUP set the cancel flag.
    pub fn new(console: Console, label: &'static str) -> Result<Self> {
        // Hidden until `start`: before that the total is unknown, and an empty total would show a full bar.
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden()).with_prefix(label);
        let template = "{prefix} [{bar:30}] {bytes}/{total_bytes}  {bytes_per_sec}  ETA {left}  {wide_msg}";
        // The first files do not predict the rest.
        let left = |state: &ProgressState, text: &mut dyn fmt::Write| {
            let can_estimate = state.elapsed() > Duration::from_secs(2) && state.pos() > 0;
            // A write error means that the bar is not drawn.
            let _ = if can_estimate { write!(text, "{:#}", HumanDuration(state.eta())) } else { text.write_str("-") };
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let style = style.with_key("left", left);
        bar.set_style(style.progress_chars("=> "));
        Ok(Self { bar, cancelled: cancel_flag()?, console })
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
        if !self.console.quiet {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
    }

    fn starts_over(&self, reason: &str) {
        self.bar.suspend(|| self.console.note(format_args!("starting over: {reason}")));
    }

    fn file(&self, name: &str) {
        if self.console.verbose > 0 {
            self.bar.suspend(|| self.console.note(name));
        }
    }

    fn tensor(&self, name: &str) {
        if self.console.verbose > 1 {
            self.bar.suspend(|| self.console.note(format_args!("  {name}")));
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

/// Returns [`signals::cancel_flag`], with its error as a failure.
pub fn cancel_flag() -> Result<Arc<AtomicBool>> {
    signals::cancel_flag().map_err(Failure::io("cannot listen to signals"))
}
