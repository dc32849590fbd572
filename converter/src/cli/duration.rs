//! Durations as people write them.

use std::time::Duration;

/// `90`, `90s`, `10m`, `2h` or `7d`.
pub(super) fn parse(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86400,
        unit => return Err(format!("`{unit}` is not a unit of time (s, m, h, d)")),
    };
    let count: u64 = digits.parse().map_err(|_| "a number with a unit is expected: 90s, 10m, 2h, 1d".to_owned())?;
    count.checked_mul(unit).map(Duration::from_secs).ok_or_else(|| "it is too long".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let good = [("0", 0), ("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400)];
        for (text, seconds) in good {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "s", "-1s", "1.5h", "1w", "1 h", "99999999999999999999", "300000000000000000d"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
