//! Where the members of an archive are.
//!
//! A minimal reader of the outer tar of an image archive: names, sizes and links, by the headers alone. The members'
//! bytes stay where they are. (Layers have a full parser of their own.)

use super::SourceError;
use super::layout::{Location, Members};
use crate::entry::printable;
use crate::read_at::ReadAt;
use crate::unpack::{Limits, UnpackError, Unpacker, magic};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const BLOCK: u64 = 512;
/// Most members; an image has a few for each layer.
const MEMBERS: usize = 100_000;
/// Most bytes of a PAX header or GNU long name.
const EXTENSION: u64 = 1 << 20;
/// Most links from one member to the next.
const HOPS: usize = 16;

/// An archive's members.
#[derive(Debug)]
pub struct Archive {
    /// What the user named.
    path: PathBuf,
    /// Where the plain tar is.
    data: PathBuf,
    index: ArchiveIndex,
}

/// Opens an archive and reads its index. A compressed one is unpacked once into an unnamed file in `scratch` (nothing
/// is left of it when the process dies); the returned handle keeps that file, which is reached through `/proc/self/fd`.
///
/// # Errors
/// When it cannot be read or unpacked, or is no tar.
pub fn open(path: &Path, scratch: &Path) -> Result<(Archive, Option<Arc<File>>), SourceError> {
    let io = |e| SourceError::io(path, e);
    let file = File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() {
        return Err(SourceError::NotA { path: path.to_owned(), what: "an archive must be a regular file" });
    }
    let mut head = vec![0; usize::try_from(metadata.len()).unwrap_or(usize::MAX).min(magic::HEAD_LEN)];
    ReadAt::read_exact_at(&file, &mut head, 0).map_err(io)?;
    let (file, keep, data) = match magic::detect(&head) {
        magic::Format::Plain => (Arc::new(file), None, path.to_owned()),
        _ => {
            let plain = Arc::new(unpack(path, file, scratch)?);
            let data = PathBuf::from(format!("/proc/self/fd/{}", plain.as_raw_fd()));
            (plain.clone(), Some(plain), data)
        }
    };
    let index = ArchiveIndex::read(&*file).map_err(|e| match e {
        IndexError::Io(source) => SourceError::Io { path: path.to_owned(), source },
        IndexError::Tar(what) => SourceError::Archive { path: path.to_owned(), what },
    })?;
    Ok((Archive { path: path.to_owned(), data, index }, keep))
}

fn unpack(path: &Path, packed: File, scratch: &Path) -> Result<File, SourceError> {
    let broken = |e: UnpackError| match e {
        UnpackError::Read(e) => SourceError::io(path, e),
        other => SourceError::Archive { path: path.to_owned(), what: other.to_string() },
    };
    let mut unpacker = Unpacker::new(packed, Limits::default()).map_err(broken)?;
    let mut plain = tempfile::tempfile_in(scratch).map_err(|e| SourceError::io(scratch, e))?;
    let mut buf = vec![0; 256 << 10];
    loop {
        let n = unpacker.read(&mut buf).map_err(broken)?;
        if n == 0 {
            return Ok(plain);
        }
        io::Write::write_all(&mut plain, &buf[..n]).map_err(|e| SourceError::io(scratch, e))?;
    }
}

impl Members for Archive {
    fn place(&self) -> &Path {
        &self.path
    }

    fn find(&self, name: &str) -> Result<Option<Location>, SourceError> {
        match self.index.find(name.as_bytes()) {
            Ok(found) => Ok(found.map(|(offset, len)| Location { path: self.data.clone(), offset, len })),
            Err(what) => Err(SourceError::Archive { path: self.path.clone(), what }),
        }
    }
}

/// The members of a tar, by name.
#[derive(Debug, Default)]
pub struct ArchiveIndex {
    members: HashMap<Vec<u8>, Member>,
}

#[derive(Debug)]
enum Member {
    File {
        offset: u64,
        len: u64,
    },
    /// A hard or symbolic link; `None` when its target is outside the archive.
    Link(Option<Vec<u8>>),
}

/// Why a tar has no index.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// Reading failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes are wrong.
    #[error("{0}")]
    Tar(String),
}

/// What extension headers say of the member behind them.
#[derive(Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
}

impl ArchiveIndex {
    /// Reads all headers. The last of several members of one name counts, as it would when extracting.
    ///
    /// # Errors
    /// [`IndexError`].
    pub fn read(tar: &(impl ReadAt + ?Sized)) -> Result<Self, IndexError> {
        let end = tar.size()?;
        let mut index = Self::default();
        let mut extension = Extension::default();
        let mut at = 0;
        while at < end {
            let fail = |what: &str| IndexError::Tar(format!("{what} at byte {at}"));
            if end - at < BLOCK {
                return Err(fail("it is cut off inside a header"));
            }
            let mut header = [0u8; 512];
            tar.read_exact_at(&mut header, at)?;
            if header.iter().all(|&b| b == 0) {
                break;
            }
            if !magic::is_tar_header(&header) {
                return Err(fail("there is no tar header"));
            }
            let data = at + BLOCK;
            let kind = header[156];
            let size = match kind {
                // Types without data, whatever their size field says.
                b'1'..=b'6' => 0,
                b'x' | b'g' | b'L' | b'K' => number(&header[124..136]).ok_or_else(|| fail("the size is no number"))?,
                _ => match extension.size {
                    Some(size) => size,
                    None => number(&header[124..136]).ok_or_else(|| fail("the size is no number"))?,
                },
            };
            let data_end = data.checked_add(size).filter(|&e| e <= end);
            let data_end = data_end.ok_or_else(|| fail("it is cut off inside the member"))?;
            match kind {
                b'x' | b'L' | b'K' => {
                    if size > EXTENSION {
                        return Err(fail("an extension header is too long"));
                    }
                    let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
                    tar.read_exact_at(&mut bytes, data)?;
                    extension.add(kind, &bytes).ok_or_else(|| fail("a PAX header is malformed"))?;
                }
                b'g' => {}
                b'S' => return Err(fail("sparse members are not supported")),
                _ => index.add(&header, std::mem::take(&mut extension), data, size),
            }
            if index.members.len() > MEMBERS {
                return Err(fail("there are too many members"));
            }
            at = data_end.div_ceil(BLOCK).saturating_mul(BLOCK);
        }
        Ok(index)
    }

    fn add(&mut self, header: &[u8; 512], extension: Extension, offset: u64, len: u64) {
        let name = extension.path.unwrap_or_else(|| header_name(header));
        // A name outside the archive can never be asked for.
        let Some(name) = normalise(b"", &name) else { return };
        let target = || extension.link.unwrap_or_else(|| text(&header[157..257]).to_vec());
        let member = match header[156] {
            b'0' | 0 | b'7' => Member::File { offset, len },
            b'1' => {
                let target = normalise(b"", &target());
                if target.as_ref() == Some(&name) {
                    return; // a link to itself leaves what is there
                }
                // A hard link is what its target is now, a symbolic link what it will be.
                match target.as_ref().and_then(|t| self.members.get(t)) {
                    Some(&Member::File { offset, len }) => Member::File { offset, len },
                    _ => Member::Link(target),
                }
            }
            b'2' => {
                let target = target();
                let parent = name.iter().rposition(|&b| b == b'/').map_or(&b""[..], |slash| &name[..slash]);
                Member::Link(if target.starts_with(b"/") { None } else { normalise(parent, &target) })
            }
            _ => return,
        };
        self.members.insert(name, member);
    }

    /// Offset and length of a regular member, links followed.
    ///
    /// # Errors
    /// When links lead out of the archive or in a circle.
    pub fn find(&self, name: &[u8]) -> Result<Option<(u64, u64)>, String> {
        let mut at = normalise(b"", name).unwrap_or_default();
        for _ in 0..HOPS {
            match self.members.get(&at) {
                None => return Ok(None),
                Some(&Member::File { offset, len }) => return Ok(Some((offset, len))),
                Some(Member::Link(Some(target))) => at.clone_from(target),
                Some(Member::Link(None)) => {
                    return Err(format!("the link {} leads out of the archive", printable(&at)));
                }
            }
        }
        Err(format!("the links from {} have no end", printable(name)))
    }
}

impl Extension {
    /// Takes over a `x`, `L` or `K` header; `None` if it is malformed.
    fn add(&mut self, kind: u8, bytes: &[u8]) -> Option<()> {
        match kind {
            b'L' => self.path = Some(text(bytes).to_vec()),
            b'K' => self.link = Some(text(bytes).to_vec()),
            _ => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    // "%d %s=%s\n", the length counting all of it (POSIX pax, "pax Extended Header").
                    let space = rest.iter().position(|&b| b == b' ')?;
                    let len: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
                    let record = rest.get(space + 1..len)?.strip_suffix(b"\n")?;
                    let equals = record.iter().position(|&b| b == b'=')?;
                    let (key, value) = (&record[..equals], &record[equals + 1..]);
                    // An empty value takes back what an earlier record said.
                    let set = (!value.is_empty()).then(|| value.to_vec());
                    match key {
                        b"path" => self.path = set,
                        b"linkpath" => self.link = set,
                        b"size" if value.is_empty() => self.size = None,
                        b"size" => self.size = Some(std::str::from_utf8(value).ok()?.parse().ok()?),
                        _ => {}
                    }
                    rest = &rest[len..];
                }
            }
        }
        Some(())
    }
}

/// Bytes up to the first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|&b| b == 0).next().unwrap_or_default()
}

fn header_name(header: &[u8; 512]) -> Vec<u8> {
    let (name, prefix) = (text(&header[..100]), text(&header[345..500]));
    // The prefix is POSIX ustar's ("ustar\0"); GNU's header ("ustar ") has times there.
    if &header[257..263] == b"ustar\0" && !prefix.is_empty() { [prefix, b"/", name].concat() } else { name.to_vec() }
}

/// An octal or base-256 field.
fn number(field: &[u8]) -> Option<u64> {
    if let Some(&first @ 0x80..) = field.first() {
        if first & 0x7f != 0 {
            return None; // negative, or over 2^88
        }
        let (high, low) = field[1..].split_at(field.len() - 9);
        return high.iter().all(|&b| b == 0).then(|| low.iter().fold(0, |n, &b| (n << 8) | u64::from(b)));
    }
    let digits = text(field).trim_ascii();
    digits.iter().try_fold(0u64, |n, &b| {
        let digit = b.checked_sub(b'0').filter(|&d| d < 8)?;
        n.checked_mul(8)?.checked_add(u64::from(digit))
    })
}

/// `path` from directory `base`, without `.` and `..`; `None` when it leaves the root.
fn normalise(base: &[u8], path: &[u8]) -> Option<Vec<u8>> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in base.split(|&b| b == b'/').chain(path.split(|&b| b == b'/')) {
        match part {
            b"" | b"." => {}
            b".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join(&b'/'))
}
