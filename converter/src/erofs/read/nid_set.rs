//! A set of small numbers that lie close together, such as nids: a bitmap whose pages exist once they are touched.

use std::collections::HashMap;

/// Members per page.
const PAGE: u64 = 4096;

#[derive(Debug, Default)]
pub(crate) struct NidSet {
    pages: HashMap<u64, Box<[u64; 64]>>,
    len: u64,
}

impl NidSet {
    /// Whether `value` was absent.
    pub(crate) fn insert(&mut self, value: u64) -> bool {
        let page = self.pages.entry(value / PAGE).or_insert_with(|| Box::new([0; 64]));
        let bit = value % PAGE;
        let Some(word) = usize::try_from(bit / 64).ok().and_then(|i| page.get_mut(i)) else { return false };
        let mask = 1 << (bit % 64);
        let fresh = *word & mask == 0;
        *word |= mask;
        self.len += u64::from(fresh);
        fresh
    }

    /// How many members there are.
    pub(crate) const fn len(&self) -> u64 {
        self.len
    }
}
