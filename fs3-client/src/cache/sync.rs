//! What the parts that are checked under all schedules synchronise by. The tests compile those parts a second time, over
//! shuttle's.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) mod atomic {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}
