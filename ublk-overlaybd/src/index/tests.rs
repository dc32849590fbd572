use super::*;
use proptest::prelude::*;
use std::sync::Arc;

fn data(start: u64, len: u64, moffset: u64) -> Extent {
    Extent { start, len, kind: Kind::Data { layer: 0, moffset } }
}

fn zero(start: u64, len: u64) -> Extent {
    Extent { start, len, kind: Kind::Zero }
}

fn index(extents: &[Extent]) -> Arc<Index> {
    Arc::new(Index::from_sorted(extents.iter().copied()).unwrap())
}

#[test]
fn a_lookup_gives_holes_too() {
    let index = index(&[data(10, 5, 8), zero(20, 5)]);
    let pieces: Vec<_> = index.lookup(5..30).map(|p| (p.start, p.len, p.kind)).collect();
    let at = |moffset| Some(Kind::Data { layer: 0, moffset });
    assert_eq!(pieces, [(5, 5, None), (10, 5, at(8)), (15, 5, None), (20, 5, Some(Kind::Zero)), (25, 5, None)]);
    assert_eq!(index.lookup(12..13).next().unwrap().kind, at(10));
    assert_eq!(index.lookup(7..7).next(), None);
    assert_eq!(index.lookup(1 << 40..(1 << 40) + 1).next().unwrap().kind, None);
}

#[test]
fn beyond_two_tebibytes() {
    // 32 bits of sectors are 2 TiB: here are 8 TiB, and moffsets beyond 2^32 too.
    let tib = (1u64 << 40) / 512;
    let layer = |n: u64| index(&(0..8).map(|i| data(i * tib + n, 16, (i + 1) * (1 << 33) + n)).collect::<Vec<_>>());
    let stack = Stack::of((0..3).map(layer)).unwrap();
    for i in 0..8 {
        let pieces: Vec<_> = stack.lookup(i * tib..i * tib + 20).collect();
        let start = (i + 1) * (1 << 33);
        let expected = [
            Piece { start: i * tib, len: 1, kind: Some(Kind::Data { layer: 0, moffset: start }) },
            Piece { start: i * tib + 1, len: 1, kind: Some(Kind::Data { layer: 1, moffset: start + 1 }) },
            Piece { start: i * tib + 2, len: 16, kind: Some(Kind::Data { layer: 2, moffset: start + 2 }) },
            Piece { start: i * tib + 18, len: 2, kind: None },
        ];
        assert_eq!(pieces, expected);
    }
}

#[test]
fn extents_longer_than_an_entry_are_kept() {
    let long = zero(3, 100_000);
    let index = index(&[long, data(200_000, 50_000, 9)]);
    assert_eq!(index.len(), 11);
    assert_eq!(index.lookup(0..1 << 40).filter(|p| p.kind.is_some()).map(|p| p.len).sum::<u64>(), 150_000);
    assert_eq!(index.lookup(249_999..1 << 40).next().unwrap().kind, Some(Kind::Data { layer: 0, moffset: 50_008 }));
}

#[test]
fn what_is_no_index_is_refused() {
    let of = |extents: &[Extent]| Index::from_sorted(extents.iter().copied()).map(|_| ());
    assert_eq!(of(&[data(10, 5, 8), data(14, 1, 8)]), Err(IndexError::Unsorted { start: 14, end: 15 }));
    assert!(matches!(of(&[data(10, 0, 8)]), Err(IndexError::OutOfBounds { .. })));
    assert!(matches!(of(&[zero(u64::MAX, 2)]), Err(IndexError::OutOfBounds { .. })));
    assert!(matches!(of(&[data(1, 2, MAX_MOFFSET - 1)]), Err(IndexError::OutOfBounds { .. })));
}

#[test]
fn at_most_255_layers() {
    let stack = Stack::of((0..255).map(|i| index(&[data(i, 1, 8)]))).unwrap();
    assert_eq!(stack.layers(), 255);
    assert_eq!(stack.lookup(254..255).next().unwrap().kind, Some(Kind::Data { layer: 254, moffset: 8 }));
    assert_eq!(stack.over(index(&[])).unwrap_err(), IndexError::TooManyLayers);
}

#[test]
fn a_layer_over_a_large_base_shares_it() {
    let base = index(&(0..10_000).map(|i| data(i * 3, 2, 8 + i * 7)).collect::<Vec<_>>());
    let base = Stack::of([base]).unwrap();
    let mut stack = base.clone();
    for i in 0..100 {
        stack = stack.over(index(&[data(i * 3 + 1, 3, 8)])).unwrap();
    }
    assert!(stack.depth() > 1 && stack.depth() < 12, "{}", stack.depth());
    assert!(stack.len() < base.len() + 300);
    assert_eq!(stack.layers(), 101);
}

/// What each of the first sectors of a disk reads.
type Model = Vec<Option<Kind>>;

fn apply(model: &mut Model, extent: Extent) {
    for sector in extent.start..extent.end() {
        model[usize::try_from(sector).unwrap()] = Some(extent.kind.advanced(sector - extent.start));
    }
}

fn seen(pieces: impl Iterator<Item = Piece>, from: u64) -> Model {
    let mut at = from;
    let mut model = Vec::new();
    for piece in pieces {
        assert_eq!(piece.start, at);
        assert!(piece.len > 0);
        model.extend((0..piece.len).map(|i| piece.kind.map(|kind| kind.advanced(i))));
        at = piece.end();
    }
    model
}

const SIZE: u64 = 300;

fn extents() -> impl Strategy<Value = Vec<Extent>> {
    let one = (0..SIZE - 40, 1..40u64, 8..5000u64, proptest::bool::weighted(0.2));
    proptest::collection::vec(one, 0..40)
        .prop_map(|list| list.into_iter().map(|(s, l, m, z)| if z { zero(s, l) } else { data(s, l, m) }).collect())
}

proptest! {
    #[test]
    fn stacks_agree_with_a_plain_model(layers in proptest::collection::vec(extents(), 1..12), from in 0..SIZE, len in 0..SIZE) {
        let mut model: Model = vec![None; usize::try_from(SIZE).unwrap()];
        let mut stack = Stack::default();
        let mut indexes = Vec::new();
        for (layer, extents) in (0u8..).zip(&layers) {
            let mut replay = Replay::new();
            for &extent in extents {
                replay.insert(extent);
                let kind = match extent.kind {
                    Kind::Zero => Kind::Zero,
                    Kind::Data { moffset, .. } => Kind::Data { layer, moffset },
                };
                apply(&mut model, Extent { kind, ..extent });
            }
            let index = Arc::new(replay.to_index().unwrap());
            stack = stack.over(Arc::clone(&index)).unwrap();
            indexes.push(index);
        }
        prop_assert_eq!(&seen(stack.lookup(0..SIZE), 0), &model);
        let to = (from + len).min(SIZE);
        let part = model[usize::try_from(from).unwrap()..usize::try_from(to.max(from)).unwrap()].to_vec();
        prop_assert_eq!(&seen(stack.lookup(from..to), from), &part);
        let flat = Stack::of(indexes).unwrap();
        prop_assert_eq!(flat.depth(), 1);
        prop_assert_eq!(&seen(flat.lookup(from..to), from), &part);
        for sector in 0..SIZE {
            let found = flat.lookup(sector..sector + 1).next().unwrap().kind;
            prop_assert_eq!(found, model[usize::try_from(sector).unwrap()]);
        }
    }
}
