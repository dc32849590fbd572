//! A small tar writer of the tests' own: says exactly the bytes it is told to.

/// A header under construction, ustar unless said otherwise.
#[derive(Clone)]
pub(super) struct Header([u8; 512]);

impl Header {
    pub(super) fn new(typeflag: u8, name: &[u8]) -> Self {
        let header = Self([0; 512]).put(0, name).put(257, b"ustar\x0000").put(156, &[typeflag]);
        header.octal(100, 8, 0o644).octal(108, 8, 0).octal(116, 8, 0).octal(124, 12, 0).octal(136, 12, 0)
    }

    pub(super) fn file(name: &[u8]) -> Self {
        Self::new(b'0', name)
    }

    pub(super) fn gnu(self) -> Self {
        self.put(257, b"ustar  \0")
    }

    pub(super) fn v7(self) -> Self {
        self.put(257, &[0; 8])
    }

    pub(super) fn put(mut self, at: usize, bytes: &[u8]) -> Self {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub(super) fn octal(self, at: usize, width: usize, value: u64) -> Self {
        self.put(at, format!("{value:0digits$o}\0", digits = width - 1).as_bytes())
    }

    /// Base-256, as GNU tar and star write what octal cannot hold.
    pub(super) fn binary(self, at: usize, width: usize, value: i64) -> Self {
        let mut field = vec![if value < 0 { 0xff } else { 0 }; width];
        field[width - 8.min(width)..].copy_from_slice(&value.to_be_bytes()[8 - 8.min(width)..]);
        field[0] |= 0x80;
        self.put(at, &field)
    }

    pub(super) fn mode(self, mode: u64) -> Self {
        self.octal(100, 8, mode)
    }

    pub(super) fn size(self, size: usize) -> Self {
        self.octal(124, 12, size as u64)
    }

    pub(super) fn link(self, target: &[u8]) -> Self {
        self.put(157, target)
    }

    /// The block, with its checksum.
    pub(super) fn block(self) -> [u8; 512] {
        let header = self.put(148, b"        ");
        let sum: u64 = header.0.iter().map(|&byte| u64::from(byte)).sum();
        header.put(148, format!("{sum:06o}\0 ").as_bytes()).0
    }

    /// The block with the sum of signed bytes.
    pub(super) fn block_signed(self) -> [u8; 512] {
        let header = self.put(148, b"        ");
        let sum: i64 = header.0.iter().map(|&byte| i64::from(byte.cast_signed())).sum();
        header.put(148, format!("{sum:06o}\0 ").as_bytes()).0
    }
}

/// A PAX record: keyword and value.
pub(super) type Record<'a> = (&'a [u8], &'a [u8]);

/// An archive under construction.
#[derive(Default, Clone)]
pub(super) struct Tar(pub(super) Vec<u8>);

impl Tar {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// A header as it is, without a body.
    pub(super) fn bare(self, header: Header) -> Self {
        self.raw(&header.block())
    }

    /// A header whose size is `data`'s, and `data`.
    pub(super) fn with(self, header: Header, data: &[u8]) -> Self {
        self.bare(header.size(data.len())).body(data)
    }

    /// Data, filled up to whole blocks.
    pub(super) fn body(self, data: &[u8]) -> Self {
        let filling = data.len().next_multiple_of(512) - data.len();
        self.raw(data).raw(&vec![0; filling])
    }

    pub(super) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn pax(self, records: &[Record<'_>]) -> Self {
        self.with(Header::new(b'x', b"PaxHeaders/x"), &pax_records(records))
    }

    pub(super) fn global(self, records: &[Record<'_>]) -> Self {
        self.with(Header::new(b'g', b"GlobalHead"), &pax_records(records))
    }

    pub(super) fn long(self, typeflag: u8, name: &[u8]) -> Self {
        self.with(Header::new(typeflag, b"././@LongLink").gnu(), &[name, b"\0"].concat())
    }

    /// The finished archive.
    pub(super) fn end(self) -> Vec<u8> {
        self.raw(&[0; 1024]).0
    }
}

/// `length keyword=value\n`, the length counting itself.
pub(super) fn pax_record(keyword: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = keyword.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    [length.to_string().as_bytes(), b" ", keyword, b"=", value, b"\n"].concat()
}

pub(super) fn pax_records(records: &[Record<'_>]) -> Vec<u8> {
    records.iter().flat_map(|(keyword, value)| pax_record(keyword, value)).collect()
}
