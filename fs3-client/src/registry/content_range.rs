//! The header `Content-Range` (RFC 9110, 14.4).

/// Which bytes of what a `206` answer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ContentRange {
    /// First byte.
    pub(super) start: u64,
    /// Behind the last byte.
    pub(super) end: u64,
    /// Length of the whole, where the server says.
    pub(super) total: Option<u64>,
}

impl ContentRange {
    /// `bytes 0-99/1000`, or `*` for the total. `None` for anything else, an empty range too.
    pub(super) fn parse(value: &str) -> Option<Self> {
        let (unit, rest) = value.trim().split_once(' ')?;
        let (range, total) = rest.trim().split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let (start, last) = (number(first)?, number(last)?);
        let total = if total == "*" { None } else { Some(number(total)?) };
        let end = last.checked_add(1)?;
        let sound = unit.eq_ignore_ascii_case("bytes") && start < end && total.is_none_or(|total| end <= total);
        sound.then_some(Self { start, end, total })
    }
}

/// Digits and nothing else: `parse` would take a sign.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges() {
        let of = |start, end, total| Some(ContentRange { start, end, total });
        for (text, expected) in [
            ("bytes 0-99/1000", of(0, 100, Some(1000))),
            ("Bytes 5-5/*", of(5, 6, None)),
            ("bytes 0-999/1000", of(0, 1000, Some(1000))),
            ("bytes 0-1000/1000", None),
            ("bytes 9-5/10", None),
            ("bytes */10", None),
            ("bytes +1-5/10", None),
            ("bytes 0-18446744073709551615/*", None),
            ("bytes -5/10", None),
            ("items 0-5/10", None),
            ("bytes", None),
        ] {
            assert_eq!(ContentRange::parse(text), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_value(text in "bytes [0-9*]{0,22}-?[0-9]{0,22}/?[0-9*]{0,22}|.{0,40}") {
            if let Some(range) = ContentRange::parse(&text) {
                prop_assert!(range.start < range.end && range.total.is_none_or(|total| range.end <= total));
            }
        }
    }
}
