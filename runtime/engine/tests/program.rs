//! The walk covers every weight once, in the file's order, whatever is resident.

#[expect(dead_code, reason = "only the model's shape is used here")]
mod sample;

use ls_bundle::model::{DType, WeightMap, WeightTypes};
use ls_bundle::plan_weights;
use ls_compute::Projection;
use ls_engine::program::{self, Program, Source, Step, Walk, matrix_of};
use proptest::prelude::*;
use sample::config;
use std::collections::BTreeMap;

/// Follows a program and notes, for every row and block, where it was taken from.
#[derive(Default)]
struct Followed {
    covered: BTreeMap<(usize, &'static str), Vec<(u32, u32)>>,
    released: Vec<u32>,
    /// File offsets of the first byte of each use, in order.
    offsets: Vec<u64>,
}

impl Followed {
    fn of(program: &Program, map: &WeightMap) -> Followed {
        let mut walk = Followed::default();
        for step in &program.steps {
            match *step {
                Step::Project { layer, first, count } => {
                    let parts = &program.parts[first as usize..(first + count) as usize];
                    for part in parts {
                        let same = |a: Source| match a {
                            Source::Resident { section, .. } => (true, section),
                            Source::Piece { piece, .. } => (false, piece),
                        };
                        assert_eq!(same(part.source), same(parts[0].source), "one source a step");
                        let name = match part.projection {
                            Projection::Query => "q",
                            Projection::Key => "k",
                            Projection::Value => "v",
                            Projection::Output => "o",
                        };
                        let matrix = matrix_of(&map.layers[layer.index()], part.projection);
                        let extent = matrix.rows_extent(part.first_row, part.rows);
                        walk.take(
                            program,
                            layer.index(),
                            name,
                            part.first_row,
                            part.rows,
                            extent.offset,
                            extent.len,
                            part.source,
                        );
                    }
                }
                Step::Mlp { layer, first_block, blocks, source } => {
                    let ffn = &map.layers[layer.index()].ffn;
                    let (offset, len) =
                        (ffn.block(first_block).1.offset, u64::from(blocks) * ffn.block_stride());
                    walk.take(
                        program,
                        layer.index(),
                        "ffn",
                        first_block,
                        blocks,
                        offset,
                        len,
                        source,
                    );
                }
                Step::Head { first_row, rows, source } => {
                    let extent =
                        map.head.as_ref().unwrap_or(&map.embedding).rows_extent(first_row, rows);
                    walk.take(
                        program,
                        map.layers.len(),
                        "head",
                        first_row,
                        rows,
                        extent.offset,
                        extent.len,
                        source,
                    );
                }
                Step::Release(piece) => walk.released.push(piece),
                _ => {}
            }
        }
        walk
    }

    #[expect(clippy::too_many_arguments, reason = "a row of facts about one use")]
    fn take(
        &mut self,
        program: &Program,
        layer: usize,
        name: &'static str,
        first: u32,
        count: u32,
        offset: u64,
        len: u64,
        source: Source,
    ) {
        assert!(count > 0, "no empty step");
        let (found, end) = match source {
            Source::Resident { section, at } => {
                let section = program.sections[section as usize];
                (section.start + at, section.cut)
            }
            Source::Piece { piece, at } => {
                assert!(!self.released.contains(&piece), "piece {piece} is used after its release");
                let piece = program.pieces[piece as usize];
                (piece.offset + at, piece.end())
            }
        };
        assert_eq!(found, offset, "{name} {first} of layer {layer} lies elsewhere");
        assert!(
            offset + len <= end,
            "{name} {first} of layer {layer} passes the end of its source"
        );
        self.offsets.push(offset);
        self.covered.entry((layer, name)).or_default().push((first, count));
    }
}

fn check(map: &WeightMap, shares: &[f64], request_bytes: u64, walk: Walk) {
    let mut sections = program::sections(map);
    for (index, section) in sections.iter_mut().enumerate() {
        let len = (section.end - section.start) as f64;
        section.cut = program::cut_at(map, index, (shares[index % shares.len()] * len) as u64);
        if let (Walk::Sparse, Some(layer)) = (walk, map.layers.get(index)) {
            section.cut = section.cut.min(layer.ffn.offset);
        }
        assert!((section.start..=section.end).contains(&section.cut));
    }
    let program = Program::new(map, sections.clone(), request_bytes, walk);
    let followed = Followed::of(&program, map);
    let mut wanted: BTreeMap<(usize, &str), u32> = BTreeMap::new();
    for (index, layer) in map.layers.iter().enumerate() {
        wanted.insert((index, "q"), layer.q_proj.rows);
        wanted.insert((index, "k"), layer.k_proj.rows);
        wanted.insert((index, "v"), layer.v_proj.rows);
        wanted.insert((index, "o"), layer.o_proj.rows);
        if walk == Walk::Dense {
            wanted.insert((index, "ffn"), layer.ffn.blocks());
        }
    }
    let ffn_steps = program.steps.iter().filter(|step| matches!(step, Step::Ffn(_))).count();
    assert_eq!(ffn_steps, if walk == Walk::Sparse { map.layers.len() } else { 0 });
    wanted.insert((map.layers.len(), "head"), 500);
    for (key, total) in wanted {
        let mut next = 0;
        for &(first, count) in followed.covered.get(&key).unwrap_or(&Vec::new()) {
            assert_eq!(first, next, "{key:?} is walked in order, without holes");
            next += count;
        }
        assert_eq!(next, total, "{key:?} is walked to its end");
    }
    assert!(followed.offsets.is_sorted(), "file order is order of use");
    let all: Vec<u32> = (0..program.pieces.len() as u32).collect();
    assert_eq!(followed.released, all, "each piece is released once, in order");
    let walked = if map.head.is_some() { sections.len() - 1 } else { sections.len() };
    let ffn_bytes: u64 = match walk {
        Walk::Dense => 0,
        Walk::Sparse => map.layers.iter().map(|layer| layer.ffn.extent().len).sum(),
    };
    let streamed: u64 = sections[..walked].iter().map(|s| s.streamed_bytes()).sum();
    let streamed = streamed - ffn_bytes;
    assert_eq!(program.streamed_bytes(), streamed);
    let unit = map.blocks().map(|block| block.extent.len).max().unwrap();
    assert!(
        program.pieces.iter().all(|p| p.len <= request_bytes + unit),
        "pieces are about a request"
    );
}

proptest! {
    #[test]
    fn every_weight_is_walked_once_in_file_order(
        tied in any::<bool>(),
        block_neurons in 1u32..5,
        shares in prop::collection::vec(0.0f64..=1.0, 1..6),
        request_bytes in 1u64..200_000,
    ) {
        let map = plan_weights(&config(tied), WeightTypes::all(DType::F16), block_neurons).unwrap();
        check(&map, &shares, request_bytes, Walk::Dense);
        check(&map, &shares, request_bytes, Walk::Sparse);
    }
}

#[test]
fn all_resident_and_all_streamed() {
    for tied in [true, false] {
        let map = plan_weights(&config(tied), WeightTypes::all(DType::F16), 2).unwrap();
        for walk in [Walk::Dense, Walk::Sparse] {
            check(&map, &[1.0], 4096, walk);
            check(&map, &[0.0], 4096, walk);
        }
    }
}
