//! What happened, for those who watch.

use super::protocol::{Event, Happened};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::broadcast;

/// Events that a slow reader may be behind. Further ones are lost to it, which it sees by their numbers.
const BEHIND: usize = 1024;
/// Events that are kept for those who come later.
const KEPT: usize = 256;

/// The events since the daemon started: the last ones kept, new ones sent on.
#[derive(Debug)]
pub struct Events {
    state: Mutex<State>,
    sender: broadcast::Sender<Event>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    kept: std::collections::VecDeque<Event>,
}

impl Default for Events {
    fn default() -> Self {
        Self { state: Mutex::default(), sender: broadcast::channel(BEHIND).0 }
    }
}

impl Events {
    /// Tells everybody, and the log.
    pub fn tell(&self, what: Happened, device: Option<&str>, detail: Option<String>) {
        let named = device.unwrap_or("daemon");
        let said = detail.as_deref().unwrap_or("");
        match what {
            Happened::Lost => tracing::error!(?what, device = named, "{said}"),
            _ => tracing::info!(?what, device = named, "{said}"),
        }
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.last += 1;
        let event = Event {
            number: state.last,
            at_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
            what,
            device: device.map(str::to_owned),
            detail,
        };
        if state.kept.len() == KEPT {
            state.kept.pop_front();
        }
        state.kept.push_back(event.clone());
        // Sent under the lock, so that all see them in order. Nobody may be listening.
        let _ = self.sender.send(event);
    }

    /// The kept events after `number`, and all that follow.
    #[must_use]
    pub fn after(&self, number: u64) -> (Vec<Event>, broadcast::Receiver<Event>) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = state.kept.iter().filter(|event| event.number > number).cloned().collect();
        (kept, self.sender.subscribe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_late_gets_what_was_kept_and_all_that_follows() {
        let events = Events::default();
        for n in 0..300 {
            events.tell(Happened::Added, Some(&n.to_string()), None);
        }
        let (kept, mut rest) = events.after(290);
        assert_eq!(kept.iter().map(|e| e.number).collect::<Vec<_>>(), (291..=300).collect::<Vec<_>>());
        assert_eq!(events.after(0).0.len(), KEPT);
        events.tell(Happened::Removed, None, Some("why".into()));
        let next = rest.try_recv().unwrap();
        assert_eq!((next.number, next.what, next.detail.as_deref()), (301, Happened::Removed, Some("why")));
    }
}
