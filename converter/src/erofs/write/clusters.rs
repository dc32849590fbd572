//! The map of one compressed file: a header, and an index entry for each of its blocks.
//!
//! A compressed cluster is a head, a second entry that holds the number of its stored blocks, and entries that count the
//! distance to both its ends. A plain one is as many heads as it has blocks, each a cluster of its own to the kernel.
//! Where the file's last cluster is compressed and ends inside a block, that block's entry is a plain head at the end of
//! the data, of which nothing is left: so the kernel knows how long the cluster is.

use super::{PlanError, WriteError};
use crate::erofs::format::{
    BLOCK_COUNT, BLOCK_SIZE, ClusterIndex, ClusterType, MAP_BIG_PCLUSTER_1, MapHeader, NULL_BLOCK,
};
use crate::extent::{ClusterRun, Compressed};
use std::io;
use zerocopy::IntoBytes as _;

/// Emits the map of `file`. `unified[n - 1]` is where device `n` starts.
pub(super) fn put(
    file: &Compressed,
    clusters: &[ClusterRun],
    unified: &[u32],
    emit: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<(), WriteError> {
    let header = MapHeader {
        reserved: 0.into(),
        inline_size: 0.into(),
        advise: MAP_BIG_PCLUSTER_1.into(),
        algorithms: file.algorithm as u8,
        cluster_bits: 0,
    };
    emit(header.as_bytes())?;
    emit(&[0; 8])?;
    let mut entries: Vec<ClusterIndex> = Vec::new();
    for run in clusters {
        let start = usize::from(run.device).checked_sub(1).and_then(|index| unified.get(index));
        let block = start.and_then(|start| start.checked_add(run.block)).filter(|block| *block != NULL_BLOCK);
        let block = block.ok_or(PlanError::TooLarge("blocks of data"))?;
        entries.clear();
        if run.compressed {
            compressed(run, block, &mut entries)?;
        } else {
            entries.extend((0..run.blocks).map(|n| head(ClusterType::Plain, 0, block + n)));
        }
        for _ in 0..run.repeat {
            emit(entries.as_bytes())?;
        }
    }
    Ok(())
}

fn head(kind: ClusterType, offset: u16, block: u32) -> ClusterIndex {
    ClusterIndex { advise: (kind as u16).into(), offset: offset.into(), value: block.into() }
}

fn compressed(run: &ClusterRun, block: u32, entries: &mut Vec<ClusterIndex>) -> Result<(), PlanError> {
    let too_large = || PlanError::TooLarge("a compressed cluster");
    let whole = u16::try_from(run.len / BLOCK_SIZE).map_err(|_| too_large())?;
    let rest = u16::try_from(run.len % BLOCK_SIZE).expect("less than a block");
    let blocks = u16::try_from(run.blocks).ok().filter(|blocks| *blocks < BLOCK_COUNT).ok_or_else(too_large)?;
    // The entry behind the head holds the count. If there is none, or it is the one that ends the data, it is one block.
    let counted = whole > 1;
    if whole == 0 || whole >= BLOCK_COUNT || (!counted && blocks != 1) {
        return Err(too_large());
    }
    entries.push(head(ClusterType::Head1, 0, block));
    for n in 1..whole {
        let before = if n == 1 { BLOCK_COUNT | blocks } else { n };
        let value = u32::from(before) | u32::from(whole - n) << 16;
        entries.push(ClusterIndex {
            advise: (ClusterType::NonHead as u16).into(),
            offset: 0.into(),
            value: value.into(),
        });
    }
    if rest > 0 {
        entries.push(head(ClusterType::Plain, rest, 0));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compress::Algorithm;

    fn map(clusters: &[ClusterRun]) -> Vec<u64> {
        let size = clusters.iter().map(|c| u64::from(c.repeat) * u64::from(c.len)).sum();
        let file = Compressed { size, algorithm: Algorithm::Zstd, first: 0, count: 0 };
        let mut bytes = Vec::new();
        put(&file, clusters, &[1000, 5000], &mut |b| {
            bytes.extend_from_slice(b);
            Ok(())
        })
        .unwrap();
        bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect()
    }

    #[test]
    fn entries() {
        let compressed = ClusterRun { repeat: 1, len: 12_288, block: 7, blocks: 2, device: 2, compressed: true };
        let plain = ClusterRun { repeat: 1, len: 8193, block: 9, blocks: 3, device: 1, compressed: false };
        let header = [0x0003_0002_0000_0000, 0];
        let head = |block: u64| block << 32 | 1;
        let of_three = [head(5007), 0x0002_0802_0000_0002, 0x0001_0002_0000_0002];
        assert_eq!(map(&[compressed]), [&header[..], &of_three].concat());
        assert_eq!(
            map(&[ClusterRun { repeat: 2, ..compressed }, plain]),
            [&header[..], &of_three, &of_three, &[1009 << 32, 1010 << 32, 1011 << 32]].concat()
        );
        // A last cluster that ends inside a block.
        let partial = ClusterRun { len: 8192 + 5, ..compressed };
        assert_eq!(map(&[partial]), [&header[..], &[head(5007), 0x0001_0802_0000_0002, 5 << 16]].concat());
        let two = ClusterRun { len: 4096 + 5, blocks: 1, ..compressed };
        assert_eq!(map(&[two]), [&header[..], &[head(5007), 5 << 16]].concat());
    }

    #[test]
    fn what_has_no_form_is_refused() {
        let run = ClusterRun { repeat: 1, len: 8191, block: 7, blocks: 2, device: 1, compressed: true };
        for bad in [
            run,
            ClusterRun { len: 4095, blocks: 1, ..run },
            ClusterRun { len: 1 << 30, ..run },
            ClusterRun { len: 1 << 20, blocks: 2048, ..run },
        ] {
            assert!(compressed(&bad, 7, &mut Vec::new()).is_err(), "{bad:?}");
        }
        let file = Compressed { size: 12_288, algorithm: Algorithm::Lz4, first: 0, count: 0 };
        let far = ClusterRun { len: 12_288, block: u32::MAX - 1000, ..run };
        assert!(put(&file, &[far], &[1000], &mut |_| Ok(())).is_err());
        assert!(put(&file, &[run], &[], &mut |_| Ok(())).is_err());
    }
}
