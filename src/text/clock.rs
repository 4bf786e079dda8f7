//! Dates in UTC for `strftime_now` in chat templates.

use std::{
    fmt::Write,
    time::{SystemTime, UNIX_EPOCH},
};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const SECONDS_PER_DAY: u64 = 86_400;

/// Seconds since 1970.
pub(super) struct Time(u64);

/// Returns the current time.
pub(super) fn now() -> Time {
    Time(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Returns year, month from 1, day of the month from 1, and day of the year from 0.
fn date(days: u64) -> (u64, usize, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 146,097 days are 400 years.
    let (mut year, mut rest) = (1970 + days / 146_097 * 400, days % 146_097);
    while rest >= 365 + u64::from(is_leap(year)) {
        rest -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let (before, mut month) = (rest, 0);
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    (year, month + 1, rest + 1, before)
}

impl Time {
    /// Formats a time as C's `strftime` does, for the conversions that templates use; `%-d` is a number without
    /// padding. Unknown conversions stay unchanged.
    pub(super) fn format(&self, format: &str) -> String {
        let (days, second) = (self.0 / SECONDS_PER_DAY, self.0 % SECONDS_PER_DAY);
        let (year, month, day, before) = date(days);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let name = |names: &[&'static str], at: usize, long: bool| if long { names[at] } else { &names[at][..3] };
        // 1 January 1970 was a Thursday.
        let weekday = (days as usize + 4) % 7;
        let mut out = String::new();
        let mut rest = format;
        while let Some((text, conversion)) = rest.split_once('%') {
            out += text;
            let (plain, letter) = match conversion.strip_prefix('-') {
                Some(letter) => (true, letter),
                None => (false, conversion),
            };
            let mut number = |value: u64, width: usize| {
                // Writing to a string cannot fail.
                let _ = write!(out, "{value:0width$}", width = if plain { 0 } else { width });
            };
            let letters = letter.chars().next();
            match letters {
                Some('Y') => number(year, 4),
                Some('y') => number(year % 100, 2),
                Some('m') => number(month as u64, 2),
                Some('d') => number(day, 2),
                Some('j') => number(before + 1, 3),
                Some('H') => number(hour, 2),
                Some('I') => number((hour + 11) % 12 + 1, 2),
                Some('M') => number(minute, 2),
                Some('S') => number(second, 2),
                Some('p') => out += if hour < 12 { "AM" } else { "PM" },
                Some('A') => out += name(&DAYS, weekday, true),
                Some('a') => out += name(&DAYS, weekday, false),
                Some('B') => out += name(&MONTHS, month - 1, true),
                Some('b') => out += name(&MONTHS, month - 1, false),
                Some('%') => out.push('%'),
                other => {
                    out += if plain { "%-" } else { "%" };
                    out.extend(other);
                }
            }
            rest = &letter[letters.map_or(0, char::len_utf8)..];
        }
        out + rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values come from `date --utc --date=@SECONDS`.
    #[test]
    fn dates_are_those_of_the_calendar() {
        for (second, expected) in [
            (0, "1970-01-01 Thursday 00:00:00 AM 001"),
            (951_782_399, "2000-02-28 Monday 23:59:59 PM 059"),
            (951_782_400, "2000-02-29 Tuesday 00:00:00 AM 060"),
            (978_307_199, "2000-12-31 Sunday 23:59:59 PM 366"),
            (1_709_210_096, "2024-02-29 Thursday 12:34:56 PM 060"),
            (4_107_542_400, "2100-03-01 Monday 00:00:00 AM 060"),
        ] {
            assert_eq!(Time(second).format("%Y-%m-%d %A %H:%M:%S %p %j"), expected);
        }
        let leap = Time(1_709_210_096);
        assert_eq!(leap.format("%d %B %Y, %b %a %y %I"), "29 February 2024, Feb Thu 24 12");
        assert_eq!(Time(0).format("%-d %-m %I 100%% %q %-q %\u{e9} %"), "1 1 12 100% %q %-q %\u{e9} %");
    }
}
