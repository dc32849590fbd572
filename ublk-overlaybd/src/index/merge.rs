//! One sorted run over another.

use super::Extent;

/// What is seen when `upper` lies over `lower`, both in order and without overlaps; so is what comes out.
pub(super) struct Merge<U: Iterator, L: Iterator> {
    upper: std::iter::Peekable<U>,
    lower: L,
    /// What is left of the lower extent that was begun.
    rest: Option<Extent>,
}

impl<U: Iterator<Item = Extent>, L: Iterator<Item = Extent>> Merge<U, L> {
    pub(super) fn new(upper: U, mut lower: L) -> Self {
        let rest = lower.next();
        Self { upper: upper.peekable(), lower, rest }
    }
}

impl<U: Iterator<Item = Extent>, L: Iterator<Item = Extent>> Iterator for Merge<U, L> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        let Some(low) = self.rest else { return self.upper.next() };
        match self.upper.peek() {
            Some(high) if high.start <= low.start => {
                // Emit the upper one, and pass over what it hides.
                let high = *high;
                self.upper.next();
                while let Some(low) = self.rest {
                    if low.start >= high.end() {
                        break;
                    }
                    self.rest =
                        if low.end() > high.end() { Some(low.part(high.end(), low.end())) } else { self.lower.next() };
                }
                Some(high)
            }
            Some(high) if high.start < low.end() => {
                let cut = high.start;
                self.rest = Some(low.part(cut, low.end()));
                Some(low.part(low.start, cut))
            }
            _ => {
                self.rest = self.lower.next();
                Some(low)
            }
        }
    }
}
