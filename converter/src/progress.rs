//! What a conversion tells whoever watches, and asks of them. The library prints nothing itself.

use std::any::Any;

/// Receives events, and may slow a conversion down or end it; all methods may be called from several threads at once.
pub trait Progress: Sync {
    /// Whether the conversion shall end without a result. It is asked often, and ends soon after the first `true`.
    fn is_cancelled(&self) -> bool {
        false
    }

    /// Returns when work on a layer may begin; what is returned is dropped when it rests. So several conversions can
    /// share the machine.
    fn turn(&self) -> Box<dyn Any> {
        Box::new(())
    }

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
