//! Damaged tables give an error, or tables that can be used; never a panic, never much memory.

use crate::plain::{BLOCKS, Draw, HeadKind, Plain, Shape, shapes};
use ls_hash::{ErrorClass, HashStack, Head, Kernels, PlaneBits, Scaling, Scratch, StackTables};
use proptest::prelude::*;

/// Reads `bytes` and, if they are tables, uses them. Whether they are.
fn read_and_use(bytes: &[u8]) -> bool {
    let Ok(tables) = StackTables::from_bytes(bytes) else { return false };
    assert_eq!(tables.to_bytes().unwrap(), bytes, "what is read is all there is");
    let stack = HashStack::new(tables, Kernels::detect()).unwrap();
    let mut scratch = Scratch::default();
    scratch.grow_for(&stack);
    let feature: Vec<f32> = (0..stack.tables().input.dims()).map(|i| i as f32 - 9.0).collect();
    stack.code(&feature, &mut scratch);
    match &stack.tables().head {
        Head::Code => {}
        Head::Class(_) => {
            stack.class(&feature, &mut scratch);
        }
        Head::Value(_) => {
            stack.value(&feature, &mut scratch);
        }
        Head::Blocks(head) => {
            stack.scores(&feature, None, &mut scratch, &mut vec![0; head.blocks()]);
        }
    }
    true
}

/// One change of a valid file: any bit, any byte, any length. Plain, so that a fuzzer can call it as well.
fn fuzz_damage(bytes: &mut Vec<u8>, draw: &mut Draw) {
    // Mostly near the beginning, where the sizes are.
    let end = if draw.below(3) == 0 { bytes.len() as u64 } else { 64.min(bytes.len() as u64) };
    let at = draw.below(end) as usize;
    match draw.below(5) {
        0 => bytes[at] ^= 1 << draw.below(8),
        1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][draw.below(5) as usize],
        2 => bytes.truncate(at),
        3 => bytes.insert(at, draw.bits() as u8),
        _ => {
            let len = (bytes.len() - at).min(4);
            bytes[at..at + len].copy_from_slice(&(draw.bits() as u32).to_le_bytes()[..len]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damaged_bytes_never_panic(shape in shapes(), seed in any::<u64>()) {
        let valid = Plain::random(&shape).pack().to_bytes().unwrap();
        let mut draw = Draw(seed);
        for _ in 0..20 {
            let mut bytes = valid.clone();
            for _ in 0..1 + draw.below(3) {
                if !bytes.is_empty() {
                    fuzz_damage(&mut bytes, &mut draw);
                }
            }
            read_and_use(&bytes);
        }
    }

    #[test]
    fn noise_is_not_tables(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(!read_and_use(&bytes));
    }
}

fn shape(head: HeadKind) -> Shape {
    Shape {
        dims: 20,
        stacks: 1,
        tau: 3,
        width: 8,
        layers: 2,
        last_table: false,
        planes: Some(PlaneBits::Eight),
        scaling: Scaling::Rms,
        head,
        seed: 5,
    }
}

#[test]
fn every_shorter_and_longer_file_is_refused() {
    for head in [HeadKind::Code, HeadKind::Class, HeadKind::Value, HeadKind::Signs] {
        let valid = Plain::random(&shape(head)).pack().to_bytes().unwrap();
        assert!(read_and_use(&valid));
        for len in 0..valid.len() {
            assert!(!read_and_use(&valid[..len]), "{len} of {} bytes", valid.len());
        }
        assert!(!read_and_use(&[&valid[..], &[0]].concat()));
    }
}

#[test]
fn another_version_is_unsupported_and_damage_is_invalid() {
    let mut bytes = Plain::random(&shape(HeadKind::Code)).pack().to_bytes().unwrap();
    bytes[4] = 2;
    let error = StackTables::from_bytes(&bytes).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Unsupported);
    assert!(error.to_string().contains("version 2"), "{error}");
    bytes[4] = 1;
    bytes.pop();
    let error = StackTables::from_bytes(&bytes).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Invalid);
}

/// Each change makes tables that contradict themselves; the error names what.
#[test]
fn contradictions_are_named() {
    type Change = fn(&mut StackTables);
    let changes: [(&str, Change); 12] = [
        ("dimensions of the feature", |t| t.input.gain.clear()),
        ("centers", |t| t.input.center.push(0.0)),
        ("gains", |t| t.input.gain[0] = f32::NAN),
        ("stacks", |t| t.stacks = 0),
        ("bits of an index", |t| t.tau = 0),
        ("planes", |t| t.tau = 4),
        ("dimensions of the planes", |t| t.planes.dims = 19),
        ("tables", |t| t.tables.clear()),
        ("signs of a table's row", |t| t.tables[0].width = 12),
        ("bytes of a table", |t| t.tables[0].rows.truncate(7)),
        ("signs of a binary row", |t| t.hashes[0].inputs = 16),
        ("bits behind a binary row", |t| t.hashes[0].rows[0] |= 1 << 8),
    ];
    for (what, change) in changes {
        let mut tables = Plain::random(&shape(HeadKind::Code)).pack();
        change(&mut tables);
        let error = HashStack::new(tables, Kernels::detect()).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    }
    type HeadChange = fn(&mut ls_hash::BlockHead);
    let changes: [(&str, HeadChange); 6] = [
        ("signs of a block", |h| h.bits = 8),
        ("biases of blocks", |h| h.biases.truncate(BLOCKS - 1)),
        ("bytes of the blocks' signs", |h| h.signs.truncate(60)),
        ("shift of biases", |h| h.shift = 9),
        ("unit of scores", |h| h.unit = 0.0),
        ("initial means", |h| h.signals.as_mut().unwrap().initial.clear()),
    ];
    for (what, change) in changes {
        let mut tables = Plain::random(&shape(HeadKind::Signs)).pack();
        let Head::Blocks(head) = &mut tables.head else { unreachable!() };
        change(head);
        let error = HashStack::new(tables, Kernels::detect()).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    }
}

#[test]
fn a_weight_without_a_negative_is_refused() {
    let mut tables = Plain::random(&shape(HeadKind::Code)).pack();
    let ls_hash::PlaneWeights::Int { weights, .. } = &mut tables.planes.weights else {
        unreachable!()
    };
    weights[3] = 0x80;
    assert!(HashStack::new(tables, Kernels::detect()).is_err());
}
