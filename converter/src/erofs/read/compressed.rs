//! Compressed inodes with a full index: where their clusters are, and what they hold.
//!
//! A full index has an entry for each logical cluster of the file (here of any size that the format has). A compressed
//! cluster begins at a head and ends at the next one; entries between count the distance to both. What is read is what
//! our writer and `mkfs.erofs -E legacy-compress` make with LZ4 and zstd; fragments, inline tails, extents, interlaced
//! plain clusters and references to parts of a cluster are refused by name.

use super::{Data, Extent, Image, Inode, ReadError};
use crate::compress::{self, Algorithm};
use crate::erofs::format::{
    BLOCK_COUNT, CLUSTER_PARTIAL, ClusterIndex, ClusterType, DataLayout, MAP_BIG_PCLUSTER_1, MAP_BIG_PCLUSTER_2,
    MAP_EXTENTS, MAP_FRAGMENT, MAP_INLINE, MAP_INTERLACED, MAX_PLAIN_CLUSTER, MAX_STORED_CLUSTER, MapHeader,
};
use crate::read_at::ReadAt;
use zerocopy::FromBytes;

/// The map of a compressed inode, checked to be inside the image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Map {
    /// Byte offset of the first entry.
    offset: u64,
    /// Number of entries.
    count: u64,
    /// log2 of a logical cluster.
    bits: u32,
    advise: u16,
    algorithms: u8,
}

impl Map {
    /// Byte offset behind the last entry.
    pub(super) const fn end(&self) -> u64 {
        self.offset + self.count * size_of::<ClusterIndex>() as u64
    }
}

/// One entry, decoded.
#[derive(Debug, Clone, Copy)]
enum Entry {
    Head { kind: ClusterType, at: u64, block: u32 },
    Inside { before: u16, after: u16 },
}

/// A head, and the end of what it is the head of.
struct Cluster {
    kind: ClusterType,
    at: u64,
    end: u64,
    block: u32,
    /// Blocks that are stored.
    blocks: u64,
}

impl<R: ReadAt> Image<R> {
    /// The map of a compressed inode.
    pub(super) fn cluster_map(&self, inode: &Inode) -> Result<Map, ReadError> {
        let unsupported = |what| Err(ReadError::Unsupported { nid: inode.nid, what });
        if inode.layout != DataLayout::CompressedFull {
            return unsupported("compressed data (compact index)");
        }
        let start = inode.body_offset().next_multiple_of(8);
        let mut bytes = [0u8; size_of::<MapHeader>()];
        if self.size().saturating_sub(start) < 16 {
            return Err(ReadError::inode(inode.nid, "cluster map", "the header is not inside the image"));
        }
        self.cache.read(&mut bytes, start)?;
        let Ok(header) = MapHeader::read_from_bytes(&bytes) else { return unsupported("this cluster map") };
        let advise = header.advise.get();
        if header.cluster_bits & 0x80 != 0 || advise & MAP_FRAGMENT != 0 {
            return unsupported("compressed data in fragments");
        }
        for (bit, what) in [
            (MAP_EXTENTS, "compressed data (extents)"),
            (MAP_INLINE, "compressed data with an inline tail"),
            (MAP_INTERLACED, "compressed data (interlaced)"),
        ] {
            if advise & bit != 0 {
                return unsupported(what);
            }
        }
        if advise & !(MAP_BIG_PCLUSTER_1 | MAP_BIG_PCLUSTER_2) != 0 || header.cluster_bits & 0x70 != 0 {
            return unsupported("compressed data in an unknown form");
        }
        let bits = self.superblock.block_bits + u32::from(header.cluster_bits & 0xf);
        let map = Map {
            offset: start + 16,
            count: inode.size.div_ceil(1 << bits),
            bits,
            advise,
            algorithms: header.algorithms,
        };
        if map.count > (self.size() - map.offset) / size_of::<ClusterIndex>() as u64 {
            let what = format!("{} entries have no room in the image", map.count);
            return Err(ReadError::inode(inode.nid, "cluster map", what));
        }
        Ok(map)
    }

    fn entry(&self, inode: &Inode, map: &Map, index: u64) -> Result<Entry, ReadError> {
        let mut bytes = [0u8; size_of::<ClusterIndex>()];
        self.cache.read(&mut bytes, map.offset + index * size_of::<ClusterIndex>() as u64)?;
        let [a0, a1, o0, o1, v0, v1, v2, v3] = bytes;
        let (advise, offset) = (u16::from_le_bytes([a0, a1]), u16::from_le_bytes([o0, o1]));
        let fail = |what: String| Err(ReadError::inode(inode.nid, "cluster index", format!("entry {index}: {what}")));
        if advise & CLUSTER_PARTIAL != 0 {
            return Err(ReadError::Unsupported { nid: inode.nid, what: "a reference to part of a cluster" });
        }
        let kind = match advise {
            0 => ClusterType::Plain,
            1 => ClusterType::Head1,
            2 => {
                let (before, after) = (u16::from_le_bytes([v0, v1]), u16::from_le_bytes([v2, v3]));
                return Ok(Entry::Inside { before, after });
            }
            3 => ClusterType::Head2,
            other => return fail(format!("{other:#x} has undefined bits")),
        };
        if u64::from(offset) >> map.bits != 0 {
            return fail(format!("offset {offset} is not inside a logical cluster"));
        }
        let at = (index << map.bits) + u64::from(offset);
        Ok(Entry::Head { kind, at, block: u32::from_le_bytes([v0, v1, v2, v3]) })
    }

    /// The cluster that byte `at`, below the file's size, lies in.
    fn cluster(&self, inode: &Inode, map: &Map, at: u64) -> Result<Cluster, ReadError> {
        let fail = |what: String| Err(ReadError::inode(inode.nid, "cluster index", what));
        let mut index = at >> map.bits;
        // Back to the head. Each step goes at least one entry back.
        let (kind, start, block) = loop {
            let back = match self.entry(inode, map, index)? {
                Entry::Head { kind, at: start, block } if start <= at => break (kind, start, block),
                Entry::Head { .. } => 1,
                Entry::Inside { before, .. } if before & BLOCK_COUNT != 0 => 1,
                Entry::Inside { before, .. } => u64::from(before.max(1)),
            };
            match index.checked_sub(back) {
                Some(before) => index = before,
                None => return fail(format!("byte {at} has no head before it")),
            }
        };
        // On to the next one. Each step goes at least one entry on.
        let mut next = index + 1;
        let end = loop {
            if next >= map.count {
                break inode.size;
            }
            match self.entry(inode, map, next)? {
                Entry::Head { at, .. } => break at.min(inode.size),
                Entry::Inside { after, .. } => next += u64::from(after.max(1)),
            }
        };
        if end <= at {
            return fail(format!("the cluster at byte {start} ends at {end}, but byte {at} is in it"));
        }
        let blocks = self.stored_blocks(inode, map, kind, index)?;
        Ok(Cluster { kind, at: start, end, block, blocks })
    }

    /// How many blocks the cluster takes up whose head is entry `index`.
    fn stored_blocks(&self, inode: &Inode, map: &Map, kind: ClusterType, index: u64) -> Result<u64, ReadError> {
        let (big, one) = match kind {
            ClusterType::Head1 => (map.advise & MAP_BIG_PCLUSTER_1 != 0, 1),
            ClusterType::Head2 => (map.advise & MAP_BIG_PCLUSTER_2 != 0, 1),
            _ => (false, 1u64 << (map.bits - self.superblock.block_bits)),
        };
        if !big || index + 1 >= map.count {
            return Ok(one);
        }
        match self.entry(inode, map, index + 1)? {
            Entry::Head { .. } => Ok(one),
            Entry::Inside { before, .. } if before & BLOCK_COUNT != 0 && before != BLOCK_COUNT => {
                Ok(u64::from(before & !BLOCK_COUNT))
            }
            Entry::Inside { .. } => {
                let what = format!("the cluster of entry {index} does not say how many blocks it has");
                Err(ReadError::inode(inode.nid, "cluster index", what))
            }
        }
    }

    /// The piece of a compressed file that `at`, below its size, lies in.
    pub(super) fn map_compressed(&self, inode: &Inode, at: u64) -> Result<Extent, ReadError> {
        let map = self.cluster_map(inode)?;
        let cluster = self.cluster(inode, &map, at)?;
        let (len, block_bits) = (cluster.end - cluster.at, self.superblock.block_bits);
        let stored = cluster.blocks << block_bits;
        let number = match cluster.kind {
            ClusterType::Head1 => map.algorithms & 0xf,
            ClusterType::Head2 => map.algorithms >> 4,
            _ => {
                if len > stored {
                    let what = format!("a plain cluster of {len} bytes in {} blocks", cluster.blocks);
                    return Err(ReadError::inode(inode.nid, "cluster index", what));
                }
                let data = self.locate(inode.nid, "cluster index", 0, cluster.block.into(), len)?;
                return Ok(Extent { file_offset: cluster.at, len, data });
            }
        };
        let features = self.superblock.features;
        if !features.has_zero_padding() {
            return Err(ReadError::Unsupported { nid: inode.nid, what: "compressed data without zero padding" });
        }
        if !features.has_algorithm(number) {
            let what = format!("algorithm {number}, which the superblock does not have");
            return Err(ReadError::inode(inode.nid, "cluster map", what));
        }
        let Some(algorithm) = Algorithm::from_number(number) else {
            let what = match number {
                1 => "LZMA data",
                2 => "DEFLATE data",
                _ => "data of an unknown compression",
            };
            return Err(ReadError::Unsupported { nid: inode.nid, what });
        };
        if stored > MAX_STORED_CLUSTER || len > MAX_PLAIN_CLUSTER {
            let what = format!("a cluster of {len} bytes in {stored}");
            return Err(ReadError::inode(inode.nid, "cluster index", what));
        }
        let Data::Block { device, block } = self.locate(inode.nid, "cluster index", 0, cluster.block.into(), stored)?
        else {
            return Err(ReadError::inode(inode.nid, "cluster index", "a cluster without blocks"));
        };
        // 2^20 bytes at most, so these are few.
        let blocks = u32::try_from(cluster.blocks).unwrap_or(u32::MAX);
        let data = Data::Compressed { device, block, blocks, algorithm };
        Ok(Extent { file_offset: cluster.at, len, data })
    }

    /// Reads and decompresses a cluster that stands for `len` bytes.
    pub(super) fn decompress(
        &self,
        inode: &Inode,
        devices: &[&dyn ReadAt],
        extent: &Extent,
        (device, block, blocks): (u16, u64, u32),
        algorithm: Algorithm,
    ) -> Result<Vec<u8>, ReadError> {
        // Both were checked when the extent was made: at most 1 and 12 MiB.
        let too_large = || ReadError::inode(inode.nid, "cluster index", "a cluster too large for this machine");
        let stored = usize::try_from(u64::from(blocks) << self.superblock.block_bits).map_err(|_| too_large())?;
        let mut stored = vec![0; stored];
        self.read_blocks(inode, devices, device, block << self.superblock.block_bits, &mut stored)?;
        let mut plain = vec![0; usize::try_from(extent.len).map_err(|_| too_large())?];
        compress::decompress(algorithm, &stored, &mut plain).map_err(|e| {
            let what = format!(
                "the cluster at byte {} ({blocks} blocks from block {block} of device {device}): {e}",
                extent.file_offset
            );
            ReadError::inode(inode.nid, "data", what)
        })?;
        Ok(plain)
    }
}
