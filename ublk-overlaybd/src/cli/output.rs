//! Writing to standard output: whole, buffered, and without minding a reader that leaves.

use std::io::{self, BufWriter, Write};

/// Standard output as a command sees it.
pub(super) type Out = BufWriter<io::StdoutLock<'static>>;

/// Whoever reads standard output has seen enough.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads standard output any more")]
pub(super) struct Enough;

/// Calls `f` with buffered standard output, and flushes it.
///
/// # Errors
/// [`Enough`], or what `f` or the system says.
pub(super) fn print(f: impl FnOnce(&mut Out) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = BufWriter::with_capacity(64 << 10, io::stdout().lock());
    match f(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Enough.into()),
        done => Ok(done?),
    }
}

/// Writes `value` as one line of JSON.
pub(super) fn json_line(out: &mut impl Write, value: &impl serde::Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value).map_err(io::Error::from)?;
    out.write_all(b"\n")
}

/// Writes `value` as indented JSON.
pub(super) fn json(out: &mut impl Write, value: &impl serde::Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(io::Error::from)?;
    out.write_all(b"\n")
}

/// A size for people: three digits and a binary unit.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    let mut divisor = 1u64;
    while bytes / divisor >= 1024 && unit + 1 < UNITS.len() {
        divisor *= 1024;
        unit += 1;
    }
    let (whole, tenth) = (bytes / divisor, bytes % divisor * 10 / divisor);
    if unit == 0 || whole >= 100 {
        format!("{whole} {}", UNITS[unit])
    } else {
        format!("{whole}.{tenth} {}", UNITS[unit])
    }
}

/// A number of bytes as people write it: digits, and perhaps KiB, MiB, GiB or TiB (or K, M, G, T).
pub(super) fn parse_size(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let shift = match unit.trim_start() {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        other => return Err(format!("`{other}` is no unit: KiB, MiB, GiB, TiB")),
    };
    let number: u64 = digits.parse().map_err(|_| "not a number of bytes".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

/// A table with aligned columns; columns whose head starts with `>` are right-aligned.
pub(super) fn table(out: &mut impl Write, head: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
    let title = |column: usize| head[column].trim_start_matches('>');
    let widths: Vec<usize> = (0..head.len())
        .map(|c| rows.iter().filter_map(|r| r.get(c)).map(|v| v.chars().count()).fold(title(c).len(), usize::max))
        .collect();
    let mut line = |cells: &dyn Fn(usize) -> String| -> io::Result<()> {
        let mut text = String::new();
        for (c, width) in widths.iter().enumerate() {
            let (cell, gap) = (cells(c), if c == 0 { "" } else { "  " });
            let padding = " ".repeat(width.saturating_sub(cell.chars().count()));
            text += gap;
            text += &if head[c].starts_with('>') { padding + &cell } else { cell + &padding };
        }
        writeln!(out, "{}", text.trim_end())
    };
    line(&|c| title(c).to_owned())?;
    rows.iter().try_for_each(|row| line(&|c| row.get(c).cloned().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let all = [0, 1023, 1024, 102_399, 102_400, 1 << 20, u64::MAX].map(size);
        assert_eq!(all, ["0 B", "1023 B", "1.0 KiB", "99.9 KiB", "100 KiB", "1.0 MiB", "16383 PiB"]);
    }

    #[test]
    fn sizes_are_read() {
        let all = ["0", "12", "1KiB", "512 MiB", "3G", "1TiB"].map(|text| parse_size(text).unwrap());
        assert_eq!(all, [0, 12, 1 << 10, 512 << 20, 3 << 30, 1 << 40]);
        for text in ["", "MiB", "1 MB", "-1", "1.5G", "99999999999999999999", "99999999TiB"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn tables_align() {
        let mut out = Vec::new();
        table(&mut out, &["NAME", ">SIZE"], &[vec!["a".into(), "10".into()], vec!["long".into(), "1".into()]]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "NAME  SIZE\na       10\nlong     1\n");
    }
}
