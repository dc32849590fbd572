//! What an OCI layer means by a name (image-spec, layer.md, "Whiteouts"), judged on the name alone: what kind of
//! entry carries it does not matter (case W08), nor where in the layer it stands (W01).

/// What one path component says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning<'a> {
    /// An ordinary name.
    Ordinary,
    /// `.wh.NAME`: hides NAME of the lower layers.
    Whiteout(&'a [u8]),
    /// `.wh..wh..opq`: hides all that lower layers have in this directory.
    Opaque,
    /// Any other `.wh..wh.*`: bookkeeping of AUFS, never part of the image (W07).
    Bookkeeping,
    /// `.wh.`, `.wh..` and `.wh...`: names nothing that could be hidden.
    Invalid,
}

/// Reads one path component.
#[must_use]
pub fn meaning(name: &[u8]) -> Meaning<'_> {
    let Some(hidden) = name.strip_prefix(b".wh.") else {
        return Meaning::Ordinary;
    };
    match hidden {
        b".wh..opq" => Meaning::Opaque,
        b"" | b"." | b".." => Meaning::Invalid,
        _ if hidden.starts_with(b".wh.") => Meaning::Bookkeeping,
        _ => Meaning::Whiteout(hidden),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn w07_w10_names() {
        for (name, want) in [
            (&b".wh.test"[..], Meaning::Whiteout(b"test")),
            (b".wh..wh..opq", Meaning::Opaque),
            (b".wh..wh.plnk", Meaning::Bookkeeping),
            (b".wh..wh..opaque", Meaning::Bookkeeping),
            (b".wh..wh.opq", Meaning::Bookkeeping),
            (b".wh..wh.", Meaning::Bookkeeping),
            (b".wh.", Meaning::Invalid),
            (b".wh..", Meaning::Invalid),
            (b".wh...", Meaning::Invalid),
            (b".wh..hidden", Meaning::Whiteout(b".hidden")),
            (b"a.wh.b", Meaning::Ordinary),
            (b".wherever", Meaning::Ordinary),
            (b".wh", Meaning::Ordinary),
        ] {
            assert_eq!(meaning(name), want, "{}", String::from_utf8_lossy(name));
        }
    }
}
