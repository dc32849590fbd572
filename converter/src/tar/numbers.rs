//! The spellings of numbers and times in tar headers and PAX records.

use crate::entry::Timestamp;

/// A numeric header field: octal, or base-256 if the first bit is set (GNU tar, star). `None` if it is neither, or
/// outside `i64`. An empty field is 0, as everywhere.
pub(super) fn field(bytes: &[u8]) -> Option<i64> {
    match bytes.first() {
        Some(first) if first & 0x80 != 0 => base256(bytes),
        _ => i64::try_from(octal(bytes)?).ok(),
    }
}

/// Octal digits after any number of spaces or NULs, ended by a space, a NUL or the field's end. What stands after
/// that is ignored: writers leave junk there.
pub(super) fn octal(bytes: &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for &byte in bytes.iter().skip_while(|byte| matches!(byte, b' ' | 0)) {
        match byte {
            b'0'..=b'7' => value = value.checked_mul(8)?.checked_add(u64::from(byte - b'0'))?,
            b' ' | 0 => break,
            _ => return None,
        }
    }
    Some(value)
}

/// Big-endian two's complement whose very first bit is the marker, so that the second is the sign.
fn base256(bytes: &[u8]) -> Option<i64> {
    debug_assert!(bytes.len() <= 12, "the widest numeric field");
    let (first, rest) = bytes.split_first()?;
    let mut value = if first & 0x40 == 0 { i128::from(first & 0x7f) } else { i128::from(*first) - 0x100 };
    for &byte in rest {
        value = value.checked_mul(256)? + i128::from(byte);
    }
    i64::try_from(value).ok()
}

/// A decimal number without a sign that fits `i64`, as PAX has sizes and ids.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    let mut value = 0u64;
    for &byte in text {
        if !byte.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(byte - b'0'))?;
    }
    i64::try_from(value).is_ok().then_some(value)
}

/// A PAX time: `[-]seconds[.fraction]`. Digits past the nanoseconds are dropped towards minus infinity, as
/// `timespec64` counts and as GNU tar does.
pub(super) fn timestamp(text: &[u8]) -> Option<Timestamp> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = match text.iter().position(|&byte| byte == b'.') {
        Some(dot) => (text.get(..dot)?, text.get(dot + 1..)?),
        None => (text, &[][..]),
    };
    let whole = i64::try_from(decimal(whole)?).ok()?;
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let mut nanos = 0u32;
    for place in 0..9 {
        nanos = nanos * 10 + fraction.get(place).map_or(0, |digit| u32::from(digit - b'0'));
    }
    if !negative {
        return Some(Timestamp { secs: whole, nanos });
    }
    if fraction.iter().skip(9).any(|&digit| digit != b'0') {
        nanos += 1; // away from zero is downwards here; may reach a whole second
    }
    // -(whole + nanos) as a floor and what is left above it
    let secs = if nanos == 0 { -whole } else { whole.checked_neg()?.checked_sub(1)? };
    Some(if nanos == 0 { Timestamp { secs, nanos: 0 } } else { Timestamp { secs, nanos: 1_000_000_000 - nanos } })
}

/// `%XX` undone, as libarchive writes xattr names; a `%` before anything but two hexadecimal digits is itself.
pub(super) fn percent_decode(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let decoded = match (byte, after.get(..2)) {
            (b'%', Some(&[high, low])) => hex_digit(high).zip(hex_digit(low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        out.push(decoded.unwrap_or(byte));
        rest = if decoded.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    out
}

fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}

/// Base64 of the standard alphabet, with or without its `=` padding (libarchive writes none).
pub(super) fn base64_decode(text: &[u8]) -> Option<Vec<u8>> {
    let digits = match text {
        [digits @ .., b'=', b'='] | [digits @ .., b'='] if text.len().is_multiple_of(4) => digits,
        digits => digits,
    };
    if digits.len() % 4 == 1 {
        return None;
    }
    let mut out = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    let (mut bits, mut count) = (0u16, 0u32);
    for &digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u16::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            let [_, byte] = (bits >> count).to_be_bytes();
            out.push(byte);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(secs: i64, nanos: u32) -> Option<Timestamp> {
        Some(Timestamp { secs, nanos })
    }

    #[test]
    fn octal_fields() {
        for (text, want) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\x000644\0", Some(0o644)),
            (b"644\0junk", Some(0o644)),
            (b"00000000", Some(0)),
            (b"        ", Some(0)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"77777777777", Some(0o77_777_777_777)),
            (b"0000648\0", None),
            (b"-1\0", None),
            (b"0x12\0", None),
            (b"7777777777777777777777777", None),
        ] {
            assert_eq!(field(text), want, "{text:?}");
        }
    }

    #[test]
    fn t14_base_256_fields() {
        assert_eq!(field(b"\x80\0\0\0\0\x20\0\0"), Some(2_097_152));
        assert_eq!(field(b"\x80\0\0\0\x77\x35\x94\0"), Some(2_000_000_000));
        assert_eq!(field(b"\x80\0\0\0\xff\xff\xff\xfe"), Some(4_294_967_294));
        assert_eq!(field(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), Some(-1));
        assert_eq!(field(b"\xff\xff\xff\xff\x80\0\0\0\0\0\0\0"), Some(i64::MIN));
        assert_eq!(field(b"\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff"), None, "below i64");
        assert_eq!(field(b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff"), Some(i64::MAX));
        assert_eq!(field(b"\x80\0\0\0\x80\0\0\0\0\0\0\0"), None, "above i64");
        assert_eq!(field(b"\xbf\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None);
    }

    #[test]
    fn t07_pax_times() {
        assert_eq!(timestamp(b"123.5"), time(123, 500_000_000));
        assert_eq!(timestamp(b"-1.25"), time(-2, 750_000_000));
        assert_eq!(timestamp(b"0.000000001"), time(0, 1));
        assert_eq!(timestamp(b"-0.000000001"), time(-1, 999_999_999));
        assert_eq!(timestamp(b"-0"), time(0, 0));
        assert_eq!(timestamp(b"-6795364579"), time(-6_795_364_579, 0), "1754-08-30");
        assert_eq!(timestamp(b"1.9999999999"), time(1, 999_999_999));
        assert_eq!(timestamp(b"-1.9999999999"), time(-2, 0));
        assert_eq!(timestamp(b"1."), time(1, 0));
        for junk in [&b""[..], b".", b".5", b"-", b"1.-5", b"--1", b"+1", b"999xxx", b"\0\0\0", b"1\0", b"1e9"] {
            assert_eq!(timestamp(junk), None, "{junk:?}");
        }
        assert_eq!(timestamp(b"9223372036854775807"), time(i64::MAX, 0));
        assert_eq!(timestamp(b"-9223372036854775807.5"), time(i64::MIN, 500_000_000));
        assert_eq!(timestamp(b"9223372036854775808"), None);
    }

    #[test]
    fn x05_percent_and_base64() {
        assert_eq!(percent_decode(b"user.a%3Db%25%c3%A9"), b"user.a=b%\xc3\xa9");
        assert_eq!(percent_decode(b"100%"), b"100%");
        assert_eq!(percent_decode(b"%4"), b"%4");
        assert_eq!(percent_decode(b"%zz%41"), b"%zzA");
        for (text, want) in [
            (&b""[..], Some(&b""[..])),
            (b"Zg", Some(b"f")),
            (b"Zg==", Some(b"f")),
            (b"Zm8", Some(b"fo")),
            (b"Zm8=", Some(b"fo")),
            (b"Zm9v", Some(b"foo")),
            (b"/wo9AA", Some(b"\xff\n=\0")),
            (b"Z", None),
            (b"Zm9v=", None),
            (b"Z===", None),
            (b"Zm 9v", None),
        ] {
            assert_eq!(base64_decode(text).as_deref(), want, "{text:?}");
        }
    }
}
