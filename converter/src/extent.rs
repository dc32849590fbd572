//! Where a regular file's contents are.

use crate::compress::Algorithm;

/// The contents of a regular file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileData {
    /// No bytes.
    Empty,
    /// A small file: its bytes are in the spool, or in one of several images, and go beside the inode.
    Inline {
        /// Offset in the spool; see [`in_part`] for one of several images.
        at: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Chunks of a fixed power-of-two size.
    Chunked(Chunked),
    /// Clusters, some of them compressed.
    Compressed(Compressed),
}

/// Bits of an offset inside one of several images.
const PART_BITS: u32 = 48;

/// An offset in one of several images, as one number; `None` when it does not fit.
#[must_use]
pub const fn in_part(part: u16, offset: u64) -> Option<u64> {
    if offset >> PART_BITS == 0 { Some((part as u64) << PART_BITS | offset) } else { None }
}

/// The reverse of [`in_part`].
#[must_use]
pub const fn part_of(at: u64) -> (usize, u64) {
    ((at >> PART_BITS) as usize, at & ((1 << PART_BITS) - 1))
}

impl FileData {
    /// Length in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Inline { len, .. } => *len as u64,
            Self::Chunked(c) => c.size,
            Self::Compressed(c) => c.size,
        }
    }
}

/// A file in chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunked {
    /// Length in bytes; the last chunk may be shorter than the others.
    pub size: u64,
    /// log2 of the chunk size in bytes, at least 12.
    pub chunk_bits: u8,
    /// First run in [`Runs`].
    pub first: u32,
    /// Number of runs.
    pub count: u32,
}

impl Chunked {
    /// Number of chunks.
    #[must_use]
    pub const fn chunks(&self) -> u64 {
        self.size.div_ceil(1 << self.chunk_bits)
    }
}

/// A file in clusters, each compressed alone or plain. It has no holes: zeros are a cluster like others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compressed {
    /// Length in bytes, more than 0: the sum of its clusters'.
    pub size: u64,
    /// Of all its compressed clusters.
    pub algorithm: Algorithm,
    /// First entry in the table of [`Runs::clusters_of`].
    pub first: u32,
    /// Number of entries.
    pub count: u32,
}

/// Consecutive clusters of one file that are all stored in the same place: one cluster, or equal ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterRun {
    /// How many.
    pub repeat: u32,
    /// Plain bytes of one of them, more than 0: a multiple of the block size, but for the file's last.
    pub len: u32,
    /// First block on the device.
    pub block: u32,
    /// Blocks that one of them takes up there; fewer than its plain bytes would if it is compressed, else just as many.
    pub blocks: u32,
    /// 1-based device.
    pub device: u16,
    /// Whether it is compressed.
    pub compressed: bool,
}

/// Consecutive chunks of one file whose data is also consecutive on one device, or consecutive holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of chunks.
    pub chunks: u32,
    /// 1-based device; 0 for holes.
    pub device: u16,
    /// First block on the device; [`crate::erofs::format::NULL_BLOCK`] for holes.
    pub block: u32,
}

/// The runs of all files of a layer, and the clusters of those that are compressed.
#[derive(Debug, Default)]
pub struct Runs {
    runs: Vec<Run>,
    clusters: Vec<ClusterRun>,
}

impl Runs {
    /// The runs of one file.
    ///
    /// # Panics
    /// When `file` is of another layer.
    #[must_use]
    pub fn of(&self, file: &Chunked) -> &[Run] {
        &self.runs[file.first as usize..][..file.count as usize]
    }

    /// The runs of one file, to be changed.
    ///
    /// # Panics
    /// When `file` is of another layer.
    pub fn of_mut(&mut self, file: &Chunked) -> &mut [Run] {
        &mut self.runs[file.first as usize..][..file.count as usize]
    }

    /// The clusters of one file.
    ///
    /// # Panics
    /// When `file` is of another layer.
    #[must_use]
    pub fn clusters_of(&self, file: &Compressed) -> &[ClusterRun] {
        &self.clusters[file.first as usize..][..file.count as usize]
    }

    /// The clusters of one file, to be changed.
    ///
    /// # Panics
    /// When `file` is of another layer.
    pub fn clusters_of_mut(&mut self, file: &Compressed) -> &mut [ClusterRun] {
        &mut self.clusters[file.first as usize..][..file.count as usize]
    }

    /// Index that the next entry of a compressed file will get.
    ///
    /// # Panics
    /// When there are 2^32 entries.
    #[must_use]
    pub fn next_cluster(&self) -> u32 {
        u32::try_from(self.clusters.len()).expect("fewer than 2^32 clusters")
    }

    /// Appends clusters to the file whose entries start at `first`, joining them to the last entry where they are the
    /// same.
    pub fn push_cluster(&mut self, first: u32, run: ClusterRun) {
        if self.clusters.len() > first as usize
            && let Some(last) = self.clusters.last_mut()
            && *last == (ClusterRun { repeat: last.repeat, ..run })
            && let Some(repeat) = last.repeat.checked_add(run.repeat)
        {
            last.repeat = repeat;
        } else {
            self.clusters.push(run);
        }
    }

    /// The clusters of all files.
    pub(crate) fn all_clusters_mut(&mut self) -> &mut [ClusterRun] {
        &mut self.clusters
    }

    /// Index that the next run will get.
    ///
    /// # Panics
    /// When there are 2^32 runs.
    #[must_use]
    pub fn next(&self) -> u32 {
        u32::try_from(self.runs.len()).expect("fewer than 2^32 runs")
    }

    /// Appends one chunk to the file whose runs start at `first`, joining it to the last run where it continues it.
    pub fn push(&mut self, first: u32, device: u16, block: u32, blocks_a_chunk: u32) {
        use crate::erofs::format::NULL_BLOCK;
        if self.runs.len() > first as usize
            && let Some(last) = self.runs.last_mut()
            && last.device == device
            && last.chunks < u32::MAX
            && (if block == NULL_BLOCK {
                last.block == NULL_BLOCK
            } else {
                last.block != NULL_BLOCK
                    && u64::from(last.block) + u64::from(last.chunks) * u64::from(blocks_a_chunk) == u64::from(block)
            })
        {
            last.chunks += 1;
        } else {
            self.runs.push(Run { chunks: 1, device, block });
        }
    }

    /// Appends `chunks` holes.
    pub fn push_holes(&mut self, first: u32, mut chunks: u64) {
        use crate::erofs::format::NULL_BLOCK;
        while chunks > 0 {
            let extend = self.runs.len() > first as usize
                && self.runs.last().is_some_and(|last| last.block == NULL_BLOCK && last.chunks < u32::MAX);
            if !extend {
                self.runs.push(Run { chunks: 0, device: 0, block: NULL_BLOCK });
            }
            let last = self.runs.last_mut().expect("one was pushed");
            let take = chunks.min(u64::from(u32::MAX - last.chunks));
            last.chunks += u32::try_from(take).expect("at most u32::MAX");
            chunks -= take;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_clusters_in_a_row_are_one_entry() {
        let mut runs = Runs::default();
        let zero = ClusterRun { repeat: 1, len: 65_536, block: 7, blocks: 1, device: 1, compressed: true };
        runs.push_cluster(0, zero);
        runs.push_cluster(0, ClusterRun { repeat: 5, ..zero });
        runs.push_cluster(1, zero);
        let file = |first, count| Compressed { size: 1, algorithm: Algorithm::Lz4, first, count };
        assert_eq!(runs.clusters_of(&file(0, 2)), [ClusterRun { repeat: 6, ..zero }, zero]);
        assert_eq!(runs.next_cluster(), 2);
    }
}
