//! Where everything goes in a metadata image, decided before a byte is written.
//!
//! ```text
//! block 0: 1 KiB unused, superblock, compression configurations, device table, first inodes
//! blocks:  inodes, each with its xattrs and its tail (small file, symlink, directory's last block), chunk indexes or
//!          index of clusters
//! blocks:  directories' full blocks, long symlinks
//! blocks:  shared xattrs
//! ```
//! An inode and what is beside it lie in one block when they fit one, since a tail must not cross a block boundary.
//! The gaps that tails leave are filled by best fit: the block with the least room that is enough. So inlining costs
//! hardly more than the inlined bytes.

use super::dirents;
use super::format::{
    BLOCK_SIZE, CompactInode, DataLayout, DeviceSlot, ExtendedInode, MAX_STORED_CLUSTER, NULL_BLOCK, SLOT_SIZE,
    SUPERBLOCK_AT, Superblock,
};
use super::xattr::Shared;
use crate::compress::Algorithm;
use crate::entry::Timestamp;
use crate::extent::{FileData, Runs};
use crate::tree::{InodeId, Kind, Tree};
use hashbrown::HashMap;

/// Slots in a block.
const SLOTS: u32 = BLOCK_SIZE / SLOT_SIZE;
/// Bytes of one chunk index.
const INDEX: u64 = 8;
/// Bytes in front of a compressed file's index.
const MAP_SIZE: u64 = 16;
/// Most chunks of one file: 512 MiB of indexes.
const MAX_CHUNKS: u64 = 1 << 26;

/// Why a tree does not fit EROFS.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// More blocks or inodes than 32 bits count.
    #[error("the layer needs more metadata than EROFS can address ({0})")]
    TooLarge(&'static str),
    /// A file with too many chunks.
    #[error("a file of {size} bytes needs {chunks} chunk indexes; at most {MAX_CHUNKS} are written")]
    TooManyChunks {
        /// Its length in bytes.
        size: u64,
        /// How many it has.
        chunks: u64,
    },
    /// A caller put a file beside its inode that does not fit there.
    #[error("internal: a file of {len} bytes does not fit beside its inode")]
    InlineTooLong {
        /// Its length in bytes.
        len: u32,
    },
}

/// One inode's place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub(super) inode: InodeId,
    pub(super) links: u32,
    /// Position in units of [`SLOT_SIZE`] from the image's start.
    pub(super) slot: u32,
    pub(super) extended: bool,
    pub(super) layout: DataLayout,
    /// First block of a directory or of a long symlink; [`NULL_BLOCK`] when there is none.
    pub(super) block: u32,
    /// Length as `stat` shows it.
    pub(super) size: u64,
}

/// What the compressed files of an image need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Compression {
    /// Most blocks of an LZ4 cluster; 0 if there is none.
    pub(super) lz4_blocks: u16,
    /// log2 of the most plain bytes of a zstd cluster; 0 if there is none.
    pub(super) zstd_window: u8,
}

impl Compression {
    fn of(tree: &Tree, order: &[(InodeId, u32)], runs: &Runs) -> Result<Self, PlanError> {
        let mut found = Self::default();
        for (id, _) in order {
            let Kind::Regular(FileData::Compressed(file)) = &tree.inode(*id).kind else { continue };
            match file.algorithm {
                Algorithm::Lz4 => found.lz4_blocks = found.lz4_blocks.max(1),
                Algorithm::Zstd => found.zstd_window = found.zstd_window.max(10),
            }
            for run in runs.clusters_of(file).iter().filter(|run| run.compressed) {
                if u64::from(run.blocks) * u64::from(BLOCK_SIZE) > MAX_STORED_CLUSTER
                    || u64::from(run.len) > MAX_STORED_CLUSTER
                {
                    return Err(PlanError::TooLarge("a compressed cluster"));
                }
                match file.algorithm {
                    Algorithm::Lz4 => {
                        let blocks = u16::try_from(run.blocks).map_err(|_| PlanError::TooLarge("a cluster"))?;
                        found.lz4_blocks = found.lz4_blocks.max(blocks);
                    }
                    Algorithm::Zstd => {
                        let log = u32::BITS - (run.len - 1).leading_zeros();
                        found.zstd_window = found.zstd_window.max(u8::try_from(log).unwrap_or(u8::MAX));
                    }
                }
            }
        }
        Ok(found)
    }

    pub(super) const fn is_used(self) -> bool {
        self.lz4_blocks > 0 || self.zstd_window > 0
    }
}

/// A metadata image, placed.
#[derive(Debug)]
pub struct Plan<'t> {
    pub(super) tree: &'t Tree,
    /// In tree order: the root first.
    pub(super) nodes: Vec<Node>,
    /// Position in `nodes` of each inode of the tree; `u32::MAX` for those out of reach.
    pub(super) position: Vec<u32>,
    pub(super) epoch: Timestamp,
    /// Shared attributes' records.
    pub(super) shared_area: Vec<u8>,
    /// By set of attributes: its bytes beside an inode.
    areas: Vec<Box<[u8]>>,
    pub(super) meta_block: u32,
    pub(super) xattr_block: u32,
    /// Blocks of the image.
    pub(super) blocks: u32,
    pub(super) chunked: bool,
    /// What compressed files need.
    pub(super) compression: Compression,
}

impl<'t> Plan<'t> {
    /// Places `tree`, whose files have their contents at `runs`, behind a device table of `devices` entries.
    ///
    /// # Errors
    /// When EROFS cannot hold it.
    pub fn new(tree: &'t Tree, runs: &Runs, devices: usize) -> Result<Self, PlanError> {
        Self::of_ordered(tree, &tree.order(), runs, devices)
    }

    /// As [`Plan::new`], with what [`Tree::order`] gave.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn of_ordered(
        tree: &'t Tree,
        order: &[(InodeId, u32)],
        runs: &Runs,
        devices: usize,
    ) -> Result<Self, PlanError> {
        let mut position = vec![u32::MAX; tree.inodes().len()];
        for (at, (inode, _)) in order.iter().enumerate() {
            position[*inode as usize] = u32::try_from(at).map_err(|_| PlanError::TooLarge("inodes"))?;
        }
        let epoch = commonest_time(tree, order);
        let mut uses = vec![0u64; tree.xattrs().len()];
        for (inode, _) in order {
            uses[tree.inode(*inode).xattrs.index()] += 1;
        }
        let used = || tree.xattrs().all().zip(&uses).map(|(set, n)| (set, *n));
        let shared = Shared::choose(used().filter(|(_, n)| *n > 0));
        // Those out of use have no bytes, so that they cost none.
        let areas = used().map(|(set, n)| if n > 0 { shared.inline_area(set).into() } else { Box::default() });
        let areas = areas.collect();
        let mut plan = Self {
            tree,
            nodes: Vec::with_capacity(order.len()),
            position,
            epoch,
            shared_area: shared.area,
            areas,
            meta_block: 0,
            xattr_block: 0,
            blocks: 0,
            chunked: false,
            compression: Compression::of(tree, order, runs)?,
        };
        plan.place_nodes(order, devices)?;
        Ok(plan)
    }

    /// Number of inodes.
    #[must_use]
    pub fn inodes(&self) -> usize {
        self.nodes.len()
    }

    /// Byte offset of the device table: behind the superblock and the configurations, which take less than a slot.
    pub(super) fn device_table(&self) -> usize {
        let configurations = if self.compression.is_used() { size_of::<DeviceSlot>() } else { 0 };
        SUPERBLOCK_AT + size_of::<Superblock>() + configurations
    }

    fn place_nodes(&mut self, order: &[(InodeId, u32)], devices: usize) -> Result<(), PlanError> {
        let head = self.device_table() + devices * size_of::<DeviceSlot>();
        let head_slots =
            u32::try_from(head.div_ceil(SLOT_SIZE as usize)).map_err(|_| PlanError::TooLarge("devices"))?;
        // The root's nid has 16 bits, counted from the first metadata block: that in which the device table ends, since
        // what is left of it holds inodes too.
        self.meta_block = head_slots / SLOTS;
        let mut space = Space::after(head_slots);
        let mut later: Vec<(usize, u32)> = Vec::new();
        let mut bare_end = 0;
        for (inode, links) in order {
            let mut node = self.describe(*inode, *links);
            let (bytes, blocks) = self.measure(&mut node)?;
            node.slot = space.take(bytes)?;
            if bytes == u64::from(node.header_len()) {
                bare_end = bare_end.max(node.slot + node.header_len() / SLOT_SIZE);
            }
            if blocks > 0 {
                later.push((self.nodes.len(), blocks));
            }
            self.nodes.push(node);
        }
        let mut next = space.next_block;
        let too_large = || PlanError::TooLarge("blocks");
        for (node, blocks) in later {
            self.nodes[node].block = next;
            next = next.checked_add(blocks).ok_or_else(too_large)?;
        }
        self.xattr_block = if self.shared_area.is_empty() { 0 } else { next };
        let area = u32::try_from(self.shared_area.len().div_ceil(BLOCK_SIZE as usize)).map_err(|_| too_large())?;
        self.blocks = next.checked_add(area).ok_or_else(too_large)?;
        // fsck.erofs 1.5 reads the header of an inode's xattrs even where it has none: not past the image's end.
        if u64::from(bare_end) == u64::from(self.blocks) * u64::from(SLOTS) {
            self.blocks = self.blocks.checked_add(1).ok_or_else(too_large)?;
        }
        Ok(())
    }

    fn describe(&self, id: InodeId, links: u32) -> Node {
        let inode = self.tree.inode(id);
        let size = match &inode.kind {
            Kind::Regular(data) => data.size(),
            Kind::Symlink(target) => target.len() as u64,
            Kind::Directory(_) => dirents::packed_size(self.name_lengths(id)),
            _ => 0,
        };
        let compact = inode.mtime == self.epoch
            && inode.uid <= u32::from(u16::MAX)
            && inode.gid <= u32::from(u16::MAX)
            && links <= u32::from(u16::MAX)
            && u32::try_from(size).is_ok();
        Node { inode: id, links, slot: 0, extended: !compact, layout: DataLayout::FlatPlain, block: NULL_BLOCK, size }
    }

    fn name_lengths(&self, id: InodeId) -> impl Iterator<Item = usize> {
        let name = |(name, _)| dirents::Name { name, nid: 0, file_type: super::format::FileType::Unknown };
        dirents::with_dots(self.tree.names_of(id).map(name), 0, 0).map(|n| n.name.len())
    }

    /// Bytes at the inode's place and whole blocks elsewhere; decides the layout.
    fn measure(&mut self, node: &mut Node) -> Result<(u64, u32), PlanError> {
        let inode = self.tree.inode(node.inode);
        let base = u64::from(node.header_len()) + self.xattr_area(node.inode).len() as u64;
        let fits = |tail: u64| base + tail <= u64::from(BLOCK_SIZE);
        Ok(match &inode.kind {
            Kind::Directory(_) | Kind::Symlink(_) => {
                let (full, tail) = (node.size / u64::from(BLOCK_SIZE), node.size % u64::from(BLOCK_SIZE));
                let inline = tail > 0 && fits(tail);
                let blocks = full + u64::from(tail > 0 && !inline);
                node.layout = if inline { DataLayout::FlatInline } else { DataLayout::FlatPlain };
                let blocks = u32::try_from(blocks).map_err(|_| PlanError::TooLarge("a directory's blocks"))?;
                (base + if inline { tail } else { 0 }, blocks)
            }
            Kind::Regular(FileData::Inline { len, .. }) => {
                if !fits(u64::from(*len)) {
                    return Err(PlanError::InlineTooLong { len: *len });
                }
                node.layout = DataLayout::FlatInline;
                (base + u64::from(*len), 0)
            }
            Kind::Regular(FileData::Chunked(file)) => {
                let chunks = file.chunks();
                if chunks > MAX_CHUNKS {
                    return Err(PlanError::TooManyChunks { size: file.size, chunks });
                }
                self.chunked = true;
                node.layout = DataLayout::ChunkBased;
                (base.next_multiple_of(INDEX) + chunks * INDEX, 0)
            }
            Kind::Regular(FileData::Compressed(file)) => {
                let blocks = file.size.div_ceil(u64::from(BLOCK_SIZE));
                if blocks > MAX_CHUNKS {
                    return Err(PlanError::TooManyChunks { size: file.size, chunks: blocks });
                }
                node.layout = DataLayout::CompressedFull;
                (base.next_multiple_of(INDEX) + MAP_SIZE + blocks * INDEX, 0)
            }
            _ => (base, 0),
        })
    }

    /// The nodes by their place in the image.
    ///
    /// Those that went to the first free block came in the order of their places; only the others, which filled gaps,
    /// are sorted.
    pub(super) fn by_slot(&self) -> impl Iterator<Item = &Node> {
        let (mut rising, mut others) = (Vec::with_capacity(self.nodes.len()), Vec::new());
        let mut end = 0;
        for (node, at) in self.nodes.iter().zip(0u32..) {
            if node.slot >= end {
                end = node.slot;
                rising.push(at);
            } else {
                others.push(at);
            }
        }
        let slot = |at: &u32| self.nodes[*at as usize].slot;
        others.sort_unstable_by_key(slot);
        let (mut rising, mut others) = (rising.into_iter().peekable(), others.into_iter().peekable());
        std::iter::from_fn(move || match (rising.peek(), others.peek()) {
            (Some(a), Some(b)) if slot(b) < slot(a) => others.next(),
            (Some(_), _) => rising.next(),
            (None, _) => others.next(),
        })
        .map(|at| &self.nodes[at as usize])
    }

    /// The bytes of an inode's attributes beside it.
    pub(super) fn xattr_area(&self, inode: InodeId) -> &[u8] {
        &self.areas[self.tree.inode(inode).xattrs.index()]
    }

    /// The number by which directories refer to a node.
    pub(super) fn nid(&self, inode: InodeId) -> u64 {
        let node = &self.nodes[self.position[inode as usize] as usize];
        u64::from(node.slot - self.meta_block * SLOTS)
    }
}

impl Node {
    /// Bytes of the inode itself.
    pub(super) fn header_len(&self) -> u32 {
        let len = if self.extended { size_of::<ExtendedInode>() } else { size_of::<CompactInode>() };
        u32::try_from(len).expect("32 or 64")
    }
}

/// The mtime that most inodes have: those can be compact. Of several, the earliest, so that the choice is one.
fn commonest_time(tree: &Tree, order: &[(InodeId, u32)]) -> Timestamp {
    let mut counts: HashMap<Timestamp, u32> = HashMap::new();
    // Neighbours mostly have the same.
    for group in order.chunk_by(|(a, _), (b, _)| tree.inode(*a).mtime == tree.inode(*b).mtime) {
        *counts.entry(tree.inode(group[0].0).mtime).or_default() += u32::try_from(group.len()).unwrap_or(u32::MAX);
    }
    counts
        .into_iter()
        .max_by_key(|(time, n)| (*n, std::cmp::Reverse(*time)))
        .map_or_else(Timestamp::default, |(t, _)| t)
}

/// Free room in metadata blocks, by how much each has left.
struct Space {
    /// `open[n]`: blocks whose last `n` slots are free.
    open: Vec<Vec<u32>>,
    next_block: u32,
}

impl Space {
    /// All room behind the first `used` slots.
    fn after(used: u32) -> Self {
        let mut space = Self { open: vec![Vec::new(); SLOTS as usize], next_block: used.div_ceil(SLOTS) };
        space.give_back(used);
        space
    }

    /// What is left of the block in which `end` lies.
    fn give_back(&mut self, end: u32) {
        let left = end.next_multiple_of(SLOTS) - end;
        if left > 0 {
            self.open[left as usize].push(end / SLOTS);
        }
    }

    /// Room for `bytes`: inside one block if they fit one, else from the start of a fresh one.
    fn take(&mut self, bytes: u64) -> Result<u32, PlanError> {
        let too_large = || PlanError::TooLarge("metadata blocks");
        let slots = u32::try_from(bytes.div_ceil(u64::from(SLOT_SIZE))).map_err(|_| too_large())?;
        let fitting = (slots..SLOTS).find(|n| !self.open[*n as usize].is_empty());
        let start = match fitting {
            Some(left) => {
                let block = self.open[left as usize].pop().expect("it was found not empty");
                block * SLOTS + (SLOTS - left)
            }
            None => {
                let start = self.next_block.checked_mul(SLOTS).ok_or_else(too_large)?;
                self.next_block = self.next_block.checked_add(slots.div_ceil(SLOTS)).ok_or_else(too_large)?;
                start
            }
        };
        let end = start.checked_add(slots).ok_or_else(too_large)?;
        self.give_back(end);
        Ok(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_fills_gaps_and_never_overlaps() {
        let mut space = Space::after(40);
        let mut taken: Vec<(u32, u32)> = Vec::new();
        for bytes in (0..400u64).map(|i| (i * 7919) % 5000 + 32) {
            let start = space.take(bytes).unwrap();
            let slots = u32::try_from(bytes.div_ceil(32)).unwrap();
            assert!(start >= 40);
            if slots <= SLOTS {
                assert_eq!(start / SLOTS, (start + slots - 1) / SLOTS, "crosses a block");
            }
            taken.push((start, start + slots));
        }
        taken.sort_unstable();
        assert!(taken.windows(2).all(|w| w[0].1 <= w[1].0), "overlap");
        let used: u32 = taken.iter().map(|(a, b)| b - a).sum();
        assert!(f64::from(used) > 0.9 * f64::from(space.next_block * SLOTS - 40), "too many gaps");
    }
}
