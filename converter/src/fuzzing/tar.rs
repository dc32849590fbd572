//! The tar parser, on any bytes:
//!
//! - it does not panic, and what it keeps between calls is bounded by its limits, not by what the archive claims;
//! - events keep the contract of [`crate::entry::EntrySink`];
//! - how the input is cut into buffers makes no difference to events, warnings and errors.

use crate::entry::{Entry, EntryKind, Warning};
use crate::tar::{Event, Limits, Parser, TarError};

/// The first eight bytes choose how the others, the archive, are cut.
pub fn tar(data: &[u8]) {
    let Some((seed, archive)) = data.split_first_chunk::<8>() else { return };
    let whole = run(archive, std::iter::repeat(usize::MAX));
    assert_eq!(run(archive, cuts(u64::from_le_bytes(*seed))), whole, "cut points changed the outcome");
}

/// Everything that can be seen of an archive.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    members: Vec<Member>,
    warnings: Vec<Warning>,
    result: Result<(), TarError>,
}

#[derive(Debug, PartialEq, Eq)]
struct Member {
    entry: Entry,
    /// Adjacent pieces joined.
    data: Vec<(u64, Vec<u8>)>,
    ended: bool,
}

/// Buffer sizes: from single bytes to several blocks.
fn cuts(seed: u64) -> impl Iterator<Item = usize> {
    let mut state = seed | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let [kind, low, ..] = state.to_le_bytes();
        match kind % 4 {
            0 => 1,
            1 => usize::from(low) + 1,
            2 => 512,
            _ => (usize::from(low) + 1) * 16,
        }
    })
}

fn limits() -> Limits {
    Limits {
        pax_bytes: 16 << 10,
        pax_global_bytes: 2 << 10,
        long_name_bytes: 8 << 10,
        sparse_segments: 64,
        warnings: 50,
    }
}

/// Vectors grow by doubling, a segment takes 16 bytes, and the records repeat what their header held.
fn allowed() -> u64 {
    let limits = limits();
    4 * limits.pax_bytes + 4 * limits.pax_global_bytes + 4 * limits.long_name_bytes + 32 * limits.sparse_segments as u64
}

fn run(mut archive: &[u8], cuts: impl Iterator<Item = usize>) -> Outcome {
    let mut parser = Parser::new(limits());
    let mut outcome = Outcome { members: Vec::new(), warnings: Vec::new(), result: Ok(()) };
    for cut in cuts {
        if archive.is_empty() {
            outcome.result = parser.finish();
            break;
        }
        let (mut buffer, rest) = archive.split_at(cut.min(archive.len()));
        archive = rest;
        if let Err(error) = feed(&mut parser, &mut buffer, &mut outcome.members) {
            assert_eq!(parser.next(&mut buffer), Err(error.clone()), "an error stays");
            outcome.result = Err(error);
            break;
        }
        assert!(buffer.is_empty(), "no event, though input is left");
        assert!(parser.held_bytes() as u64 <= allowed(), "{} bytes kept", parser.held_bytes());
    }
    if outcome.result.is_ok() {
        assert_eq!(parser.finish(), Ok(()), "finishing twice");
        assert!(outcome.members.iter().all(|member| member.ended), "an entry without an end");
    }
    outcome.warnings = parser.take_warnings();
    assert!(outcome.warnings.len() <= limits().warnings + 1);
    outcome
}

fn feed(parser: &mut Parser, buffer: &mut &[u8], members: &mut Vec<Member>) -> Result<(), TarError> {
    while let Some(event) = parser.next(buffer)? {
        match event {
            Event::Entry(entry) => {
                assert!(members.last().is_none_or(|member| member.ended), "an entry inside another");
                assert!(entry.mode <= 0o7777);
                assert!(entry.mtime.nanos < 1_000_000_000);
                assert!(entry.xattrs.windows(2).all(|pair| matches!(pair, [a, b] if a.name < b.name)));
                assert!(entry.xattrs.iter().all(|xattr| !xattr.name.is_empty() && !xattr.name.contains(&0)));
                members.push(Member { entry, data: Vec::new(), ended: false });
            }
            Event::Data { offset, bytes } => {
                let member = open(members);
                member.add(offset, bytes);
            }
            Event::EndEntry => {
                let member = open(members);
                member.ended = true;
                member.check();
            }
        }
    }
    Ok(())
}

fn open(members: &mut [Member]) -> &mut Member {
    let member = members.last_mut().filter(|member| !member.ended);
    member.unwrap_or_else(|| panic!("an event outside any entry"))
}

impl Member {
    fn add(&mut self, offset: u64, bytes: &[u8]) {
        let EntryKind::Regular { size, sparse } = self.entry.kind else { panic!("data of {:?}", self.entry) };
        assert!(!bytes.is_empty());
        assert!(offset + bytes.len() as u64 <= size, "data past the end");
        match self.data.last_mut() {
            Some((start, last)) if *start + last.len() as u64 == offset => last.extend_from_slice(bytes),
            Some((start, last)) => {
                assert!(sparse && offset > *start + last.len() as u64, "data out of order");
                self.data.push((offset, bytes.to_vec()));
            }
            None => {
                assert!(sparse || offset == 0, "data does not begin at the start");
                self.data.push((offset, bytes.to_vec()));
            }
        }
    }

    fn check(&self) {
        let sum: u64 = self.data.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        if let EntryKind::Regular { size, sparse } = self.entry.kind {
            assert_eq!(sum < size, sparse, "sparse if and only if there are holes");
        }
    }
}
