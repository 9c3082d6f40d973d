//! What `ls-prep` has learned, as tables in a bundle or as files of their own.

use crate::target::{Run, Target};
use ls_bundle::base::BaseTables;
use ls_bundle::checksum;
use ls_bundle::ids::BlockId;
use ls_cache::policy::{Hazard, ReuseDistance};
use ls_cache::{AccessTrace, Blocks, ReuseTable};
use ls_control::Lut;
use ls_control::profile::DeviceProfile;
use ls_hash::{HashStack, Kernels, Mlp, MlpScratch, MlpTables, Scratch, StackTables};
use std::path::Path;

pub(crate) const STACK: Target = Target::new("stack", "predictors of stacked hashing", |_| {
    let kernels = Kernels::detect();
    Box::new(move |bytes| {
        let Ok(tables) = StackTables::from_bytes(bytes) else { return };
        assert_eq!(tables.to_bytes().expect("what was read is valid"), bytes);
        let dims = tables.input.dims();
        let Ok(stack) = HashStack::new(tables, kernels) else { return };
        let mut scratch = Scratch::default();
        scratch.grow_for(&stack);
        if let Some(head) = stack.block_head() {
            let mut scores = vec![0; head.blocks()];
            stack.scores(&vec![0.5; dims], None, &mut scratch, &mut scores);
        }
    })
});

pub(crate) const MLP: Target = Target::new("mlp", "two-layer predictors", |_| {
    let kernels = Kernels::detect();
    Box::new(move |bytes| {
        let Ok(tables) = MlpTables::from_bytes(bytes) else { return };
        assert_eq!(tables.to_bytes(), bytes);
        let dims = tables.input.dims();
        let Ok(mlp) = Mlp::new(tables, kernels) else { return };
        let mut scratch = MlpScratch::default();
        scratch.grow_for(&mlp);
        mlp.scores(&vec![0.5; dims], &mut scratch, &mut vec![0.0; mlp.blocks()]);
    })
});

pub(crate) const REUSE: Target = Target::new("reuse", "tables of reuse", |_| {
    Box::new(|bytes| {
        let Ok(table) = ReuseTable::from_bytes(bytes) else { return };
        assert_eq!(table.to_bytes(), bytes);
        match table {
            ReuseTable::Gaps(table) => drop(ReuseDistance::new(&Blocks::even(1, 37), vec![table])),
            ReuseTable::Hazard(table) => {
                let blocks = table.initial.len() as u32;
                if blocks > 0 {
                    drop(Hazard::new(&Blocks::even(1, blocks), &[table]));
                }
            }
        }
    })
});

pub(crate) const TRACE: Target = Target::new("trace", "recorded requests for blocks", |_| {
    Box::new(|bytes| {
        let Ok(trace) = AccessTrace::from_bytes(bytes) else { return };
        assert_eq!(trace.to_bytes(), bytes);
        for (layer, range) in (0..).zip(trace.blocks().ranges()).take(3) {
            let layer = ls_bundle::ids::LayerId(layer);
            for token in 0..trace.tokens().min(3) {
                let count = trace.set(token, layer).count();
                assert_eq!(count, trace.set_len(token, layer));
                let _ = trace.contains(token, layer, BlockId(range.start));
            }
        }
    })
});

/// The first two bytes are the numbers of neurons and of columns that the model has.
pub(crate) const BASE: Target = Target::new("base", "tables of the low-bit base", |_| {
    Box::new(|bytes| {
        let [neurons, cols, tables @ ..] = bytes else { return };
        let (neurons, cols) = (u32::from(*neurons), u32::from(*cols));
        let Ok(tables) = BaseTables::from_bytes(tables, neurons, cols) else { return };
        // Bytes of a codebook that no code uses are not kept.
        assert_eq!(tables.to_bytes().len() + 2, bytes.len());
        let _ = tables.tile_bytes();
    })
});

pub(crate) const LUT: Target = Target {
    rigid: true,
    seal: seal_control,
    ..Target::new("lut", "tables of coordination plans", |_: &Path| -> Run {
        Box::new(|bytes| {
            let Ok(lut) = Lut::from_bytes(bytes) else { return };
            assert_eq!(lut.to_bytes(), bytes);
        })
    })
};

pub(crate) const PROFILE: Target = Target {
    rigid: true,
    seal: seal_control,
    ..Target::new("profile", "profiles of devices", |_: &Path| -> Run {
        Box::new(|bytes| {
            let Ok(profile) = DeviceProfile::from_bytes(bytes) else { return };
            assert_eq!(profile.to_bytes(), bytes);
        })
    })
};

/// Length and checksum of a file of `ls-control`.
fn seal_control(bytes: &mut [u8]) {
    if bytes.len() < 24 {
        return;
    }
    let len = bytes.len() as u64 - 24;
    bytes[8..16].copy_from_slice(&len.to_le_bytes());
    let end = bytes.len() - 8;
    let sum = checksum::of(&bytes[..end]);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
}
