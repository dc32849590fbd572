//! Indexes over one another.

use super::merge::Merge;
use super::{Extent, Index, IndexError, Kind, Lookup, MAX_LAYERS, Piece};
use std::ops::Range;
use std::sync::Arc;

/// An index, and what to add to its layers' numbers.
#[derive(Debug, Clone)]
struct Run {
    index: Arc<Index>,
    base: u8,
}

impl Run {
    #[inline]
    fn raised(&self, kind: Kind) -> Kind {
        match kind {
            Kind::Zero => Kind::Zero,
            // At most 255 layers, see `over`.
            Kind::Data { layer, moffset } => Kind::Data { layer: layer + self.base, moffset },
        }
    }

    fn extents(&self) -> impl Iterator<Item = Extent> + '_ {
        self.index.iter().map(|extent| Extent { kind: self.raised(extent.kind), ..extent })
    }
}

/// The indexes of an image's layers, merged as far as it pays.
///
/// Immutable: to put a layer on top gives another stack, which shares what is below. That costs the layer's own size,
/// taken over many: runs of like size are merged, so a stack has few of them, each much larger than the one over it.
#[derive(Debug, Clone)]
pub struct Stack {
    /// The newest first; at least one.
    runs: Vec<Run>,
    layers: u8,
}

impl Default for Stack {
    fn default() -> Self {
        Self { runs: vec![Run { index: Arc::default(), base: 0 }], layers: 0 }
    }
}

impl Stack {
    /// The stack of `layers`, the bottom one first, merged into one index for the fastest lookup.
    ///
    /// # Errors
    /// More than 255 layers.
    pub fn of(layers: impl IntoIterator<Item = Arc<Index>>) -> Result<Self, IndexError> {
        let mut stack = Self::default();
        for layer in layers {
            stack = stack.over(layer)?;
        }
        stack.flattened()
    }

    /// This stack with `top` over it, whose data is that of one layer, number 0. The new layer's number is
    /// [`layers`](Self::layers) of this stack.
    ///
    /// # Errors
    /// It has 255 layers already.
    pub fn over(&self, top: Arc<Index>) -> Result<Self, IndexError> {
        if usize::from(self.layers) >= MAX_LAYERS {
            return Err(IndexError::TooManyLayers);
        }
        let mut runs = Vec::with_capacity(self.runs.len() + 1);
        let mut newest = Run { index: top, base: self.layers };
        let mut older = self.runs.iter();
        for run in older.by_ref() {
            if run.index.len() > newest.index.len().saturating_mul(2) {
                runs.push(newest);
                newest = run.clone();
                break;
            }
            newest = merged(&newest, run)?;
        }
        runs.push(newest);
        runs.extend(older.cloned());
        Ok(Self { runs, layers: self.layers + 1 })
    }

    /// The same, in one index.
    ///
    /// # Errors
    /// None that its parts did not have.
    pub fn flattened(&self) -> Result<Self, IndexError> {
        let mut runs = self.runs.iter();
        let Some(mut newest) = runs.next().cloned() else { return Ok(self.clone()) };
        for run in runs {
            newest = merged(&newest, run)?;
        }
        Ok(Self { runs: vec![newest], layers: self.layers })
    }

    /// How many layers it has.
    #[must_use]
    pub fn layers(&self) -> u8 {
        self.layers
    }

    /// How many mappings its indexes hold together.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| run.index.len()).sum()
    }

    /// Whether it maps nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many indexes a lookup may have to ask.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.runs.len()
    }

    /// Bytes of memory of its indexes, which other stacks may share.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.runs.iter().map(|run| run.index.memory()).sum()
    }

    /// The pieces of `range`; a hole is a hole of all layers.
    #[must_use]
    #[inline]
    pub fn lookup(&self, range: Range<u64>) -> Pieces<'_> {
        let current = self.runs[0].index.lookup(range);
        Pieces { runs: &self.runs, current, depth: 0, outer: Vec::new() }
    }

    /// All that is mapped, in ascending order.
    ///
    /// # Errors
    /// None that its parts did not have.
    pub fn extents(&self) -> Result<Vec<Extent>, IndexError> {
        Ok(self.flattened()?.runs.first().map_or_else(Vec::new, |run| run.extents().collect()))
    }
}

fn merged(upper: &Run, lower: &Run) -> Result<Run, IndexError> {
    if upper.index.is_empty() {
        return Ok(lower.clone());
    }
    let index = Index::from_sorted(Merge::new(upper.extents(), lower.extents()))?;
    Ok(Run { index: Arc::new(index), base: 0 })
}

/// The pieces of a range, see [`Stack::lookup`].
#[derive(Debug)]
pub struct Pieces<'a> {
    runs: &'a [Run],
    current: Lookup<'a>,
    /// The run that `current` is of.
    depth: usize,
    /// What is left to do in the runs above, while a hole of theirs is looked up.
    outer: Vec<Lookup<'a>>,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        loop {
            match self.current.next() {
                Some(Piece { start, len, kind: Some(kind) }) => {
                    return Some(Piece { start, len, kind: Some(self.runs[self.depth].raised(kind)) });
                }
                Some(hole) => {
                    let Some(run) = self.runs.get(self.depth + 1) else { return Some(hole) };
                    let below = run.index.lookup(hole.start..hole.end());
                    self.outer.push(std::mem::replace(&mut self.current, below));
                    self.depth += 1;
                }
                None => {
                    self.current = self.outer.pop()?;
                    self.depth -= 1;
                }
            }
        }
    }
}
