//! Which group goes next. Pure: keys in, keys out.
//!
//! S3-FIFO (Yang et al., SOSP 2023), over groups of chunks. What is new waits in a small queue; what was touched again
//! by the time its turn comes moves to the main queue, and the rest goes, remembered for a while as a *ghost*: what comes
//! back while it is remembered goes to the main queue at once. The main queue gives each of its groups as many more
//! rounds as it was touched. So whoever reads a terabyte once passes through a tenth of the cache, and what is read every
//! day stays.
//!
//! The crates that have it (`quick_cache`, `foyer`, `moka`'s TinyLFU) own the values and evict when something is
//! inserted. Here the value is a part of a file that may be in use, and to evict it takes a durable write before the hole:
//! the policy only says whose turn it is. A touch is one store into the group's own word, and no queue moves for it.

use std::collections::{HashMap, HashSet, VecDeque};

/// A blob's number in this process, and a group of it.
pub(crate) type Key = (u32, u32);

/// The small queue's share of all groups: one in ten.
const SMALL_SHARE: usize = 10;

/// What the policy asks about a group.
pub(crate) trait Heat {
    /// How often it was touched since it came, or since it was asked to cool.
    fn heat(&self, key: Key) -> u32;
    /// Takes one touch away.
    fn cool(&self, key: Key);
}

/// The queues.
#[derive(Debug, Default)]
pub(crate) struct Policy {
    small: VecDeque<Key>,
    main: VecDeque<Key>,
    /// Where each group is.
    known: HashMap<Key, Queue>,
    ghosts: VecDeque<Key>,
    remembered: HashSet<Key>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Small,
    Main,
}

impl Policy {
    /// How many groups it knows.
    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    /// A group has chunks now. One that is known already stays where it is. Whether it is new.
    pub(crate) fn insert(&mut self, key: Key) -> bool {
        let queue = if self.remembered.remove(&key) { Queue::Main } else { Queue::Small };
        self.put(key, queue)
    }

    /// A group that had chunks when the cache was opened: it has stood its trial.
    pub(crate) fn recall(&mut self, key: Key) {
        self.put(key, Queue::Main);
    }

    fn put(&mut self, key: Key, queue: Queue) -> bool {
        if self.known.contains_key(&key) {
            return false;
        }
        self.known.insert(key, queue);
        self.queue(queue).push_back(key);
        true
    }

    fn queue(&mut self, queue: Queue) -> &mut VecDeque<Key> {
        match queue {
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        }
    }

    /// Whose turn it is. It is forgotten here; a caller who cannot evict it puts it back by [`Self::recall`].
    pub(crate) fn victim(&mut self, heat: &impl Heat) -> Option<Key> {
        loop {
            let from_small = self.main.is_empty() || self.small.len() > self.known.len() / SMALL_SHARE;
            let queue = if from_small { Queue::Small } else { Queue::Main };
            let key = self.queue(queue).pop_front()?;
            if heat.heat(key) == 0 {
                self.known.remove(&key);
                if from_small {
                    self.remember(key);
                }
                return Some(key);
            }
            // Each round takes a touch away, so this ends.
            heat.cool(key);
            self.known.insert(key, Queue::Main);
            self.main.push_back(key);
        }
    }

    /// Ghosts are as many as there are groups, and a few.
    fn remember(&mut self, key: Key) {
        if self.remembered.insert(key) {
            self.ghosts.push_back(key);
        }
        while self.ghosts.len() > self.known.len() + 64 {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.remembered.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[derive(Default)]
    struct Touches(RefCell<HashMap<Key, u32>>);

    impl Touches {
        fn touch(&self, key: Key) {
            let mut touches = self.0.borrow_mut();
            let count = touches.entry(key).or_default();
            *count = (*count + 1).min(3);
        }
    }

    impl Heat for Touches {
        fn heat(&self, key: Key) -> u32 {
            self.0.borrow().get(&key).copied().unwrap_or(0)
        }
        fn cool(&self, key: Key) {
            if let Some(count) = self.0.borrow_mut().get_mut(&key) {
                *count = count.saturating_sub(1);
            }
        }
    }

    /// A cache of `room` groups, which reads `key`. Whether it was there.
    fn read(policy: &mut Policy, touches: &Touches, room: usize, key: Key) -> bool {
        if !policy.insert(key) {
            touches.touch(key);
            return true;
        }
        touches.0.borrow_mut().remove(&key);
        while policy.len() > room {
            policy.victim(touches).unwrap();
        }
        false
    }

    #[test]
    fn a_scan_does_not_wash_out_what_is_in_use() {
        let (mut policy, touches) = (Policy::default(), Touches::default());
        let in_use = |policy: &mut Policy| (0..50).filter(|group| read(policy, &touches, 100, (0, *group))).count();
        in_use(&mut policy);
        in_use(&mut policy);
        let mut found = 0;
        // A scan of a hundred times the cache, while half of it is read again and again.
        for step in 0..100 {
            for group in 0..100 {
                read(&mut policy, &touches, 100, (1 + step, group));
            }
            found += in_use(&mut policy);
        }
        assert!(found >= 4_900, "{found} of 5,000 reads of what is in use found it");
    }

    #[test]
    fn who_comes_back_soon_stays() {
        let (mut policy, touches) = (Policy::default(), Touches::default());
        for group in 0..100 {
            read(&mut policy, &touches, 100, (0, group));
        }
        read(&mut policy, &touches, 100, (1, 0));
        // The first of the small queue went, and was remembered.
        assert!(!policy.known.contains_key(&(0, 0)));
        read(&mut policy, &touches, 100, (0, 0));
        assert_eq!(policy.known[&(0, 0)], Queue::Main);
    }

    #[test]
    fn all_groups_go_in_the_end_and_each_once() {
        let (mut policy, touches) = (Policy::default(), Touches::default());
        for group in 0..500 {
            policy.insert((0, group));
            (0..group % 5).for_each(|_| touches.touch((0, group)));
        }
        let gone: HashSet<Key> = std::iter::from_fn(|| policy.victim(&touches)).collect();
        assert_eq!((gone.len(), policy.len()), (500, 0));
        assert!(policy.ghosts.len() <= 64 + 500 && policy.ghosts.len() == policy.remembered.len());
    }
}
