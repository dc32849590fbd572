//! What a conversion tells whoever watches. The library prints nothing itself.

/// Receives events; all methods may be called from several threads at once.
pub trait Progress: Sync {
    /// Layer `index` (0 is the bottom one) begins; `bytes` is how many its source has, where known.
    fn layer_started(&self, index: usize, bytes: Option<u64>) {
        let _ = (index, bytes);
    }

    /// `bytes` more of layer `index`'s source were read.
    fn layer_read(&self, index: usize, bytes: u64) {
        let _ = (index, bytes);
    }

    /// Layer `index` is in the store; `reused` when an earlier run had put it there.
    fn layer_finished(&self, index: usize, reused: bool) {
        let _ = (index, reused);
    }

    /// The layers `range` are being merged into one.
    fn merging(&self, range: std::ops::Range<usize>) {
        let _ = range;
    }
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}
