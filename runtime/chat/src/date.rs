//! A moment as text, by the directives of C's `strftime` that chat templates use. In UTC and English.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

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
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats `at`. A directive that is not known stays as it is; a moment before 1970 is taken for its first.
pub(crate) fn format(format: &str, at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let written = match rest.next() {
            Some('Y') => write!(text, "{year}"),
            Some('m') => write!(text, "{month:02}"),
            Some('d') => write!(text, "{day:02}"),
            Some('B') => write!(text, "{month_name}"),
            Some('b') => write!(text, "{}", &month_name[..3]),
            Some('A') => write!(text, "{day_name}"),
            Some('a') => write!(text, "{}", &day_name[..3]),
            Some('H') => write!(text, "{:02}", second / 3600),
            Some('M') => write!(text, "{:02}", second / 60 % 60),
            Some('S') => write!(text, "{:02}", second % 60),
            Some('%') => write!(text, "%"),
            Some(other) => write!(text, "%{other}"),
            None => write!(text, "%"),
        };
        written.expect("a string takes all text");
    }
    text
}

/// Year, month and day of a day since 1970-01-01, in the Gregorian calendar. Years are counted from March, so that the
/// day that some years have more is their last; 146,097 days are 400 years.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::format;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn dates_are_as_date_prints_them() {
        // `date -u -d @SECONDS '+%Y-%m-%d %A %b %H:%M:%S'`
        let all = "%Y-%m-%d %A %b %H:%M:%S";
        for (seconds, text) in [
            (0, "1970-01-01 Thursday Jan 00:00:00"),
            (951_782_400, "2000-02-29 Tuesday Feb 00:00:00"),
            (1_721_952_000, "2024-07-26 Friday Jul 00:00:00"),
            (1_740_787_199, "2025-02-28 Friday Feb 23:59:59"),
            (4_107_542_399, "2100-02-28 Sunday Feb 23:59:59"),
            (4_107_542_400, "2100-03-01 Monday Mar 00:00:00"),
        ] {
            assert_eq!(format(all, UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
        assert_eq!(format("%d %B, 100%% %q %", UNIX_EPOCH), "01 January, 100% %q %");
    }
}
