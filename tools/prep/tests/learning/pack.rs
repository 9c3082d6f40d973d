//! What was learned goes into a bundle with the model.

use crate::Bench;
use ls_bundle::identity::Identity;
use ls_bundle::ids::{LayerId, NeuronId};
use ls_bundle::model::{DType, WeightTypes};
use ls_bundle::placement::Placement;
use ls_bundle::tables::{TABLE_BLOCK_BYTES, TableKind};
use ls_bundle::{Bundle, ErrorClass};
use ls_prep::model::Model;
use ls_prep::pack::{self, Learned, Table};
use std::path::Path;

fn identity() -> Identity {
    Identity { source_hash: "0".repeat(64), ..Identity::default() }
}

fn write(out: &Path, model: &Model, block_neurons: u32, learned: &Learned<'_>) -> Bundle {
    let types = WeightTypes::all(DType::F16);
    pack::write(out, model, identity(), types, block_neurons, learned, &mut ()).unwrap();
    let bundle = Bundle::open(out).unwrap();
    bundle.verify(&mut |_, _| ()).unwrap();
    bundle
}

#[test]
fn neurons_lie_as_the_placement_says() {
    let bench = Bench::new();
    let model = Model::open(&bench.model()).unwrap();
    let neurons = model.config.ffn_hidden;
    // Another order in each layer: every third neuron, then the next ones.
    let order = |layer: u32| {
        let of_third = move |third: u32| (0..neurons).filter(move |n| (n + layer) % 3 == third);
        (0..3).flat_map(of_third).map(NeuronId)
    };
    let orders = (0..u32::from(model.config.layers)).flat_map(order).collect();
    let placement = Placement::new(neurons, orders);
    let learned = Learned { placement: Some(placement.clone()), ..Learned::default() };
    let paths = ["plain.lsb", "placed.lsb"].map(|name| bench.dir.path().join(name));
    let plain = write(&paths[0], &model, 1, &Learned::default());
    let placed = write(&paths[1], &model, 2, &learned);
    assert_eq!(placed.placement(), Some(&placement));
    let files = paths.map(|path| std::fs::read(path).unwrap());
    let neuron = |bundle: &Bundle, file: &[u8], layer: LayerId, place: u32| -> Vec<u8> {
        let ffn = bundle.weights().layers[layer.index()].ffn;
        let (_, block) = ffn.block(place / ffn.block_neurons);
        let bytes = ffn.neuron_bytes();
        let start = block.offset + u64::from(place % ffn.block_neurons) * bytes;
        file[start as usize..][..bytes as usize].to_vec()
    };
    for layer in model.config.layer_ids() {
        for (place, &source) in (0..).zip(placement.layer(layer)) {
            let wanted = neuron(&plain, &files[0], layer, source.0);
            let found = neuron(&placed, &files[1], layer, place);
            assert!(found == wanted, "layer {layer}, place {place}: neuron {source}");
        }
    }
}

#[test]
fn tables_are_made_once_each_and_come_back() {
    let bench = Bench::new();
    let model = Model::open(&bench.model()).unwrap();
    let made = std::cell::Cell::new(0);
    let table = |layer: u16, kind, len: u64| {
        let made = &made;
        let content = move || {
            made.set(made.get() + 1);
            Ok((0..len).map(|at| (at % 251) as u8 ^ layer as u8).collect())
        };
        Table { layer: LayerId(layer), kind, len, content: Box::new(content) }
    };
    let tables = vec![
        table(0, TableKind::Predictor, 5),
        table(0, TableKind::Base, 2 * TABLE_BLOCK_BYTES + 3),
        table(1, TableKind::Predictor, 64),
    ];
    let learned = Learned { tables, ..Learned::default() };
    let path = bench.dir.path().join("learned.lsb");
    let bundle = write(&path, &model, 1, &learned);
    assert_eq!(made.get(), 3);
    for table in &learned.tables {
        let found = bundle.read_table(table.layer, table.kind).unwrap().unwrap();
        assert!(found == (table.content)().unwrap(), "{table:?}");
    }
    // A damaged table is found when it is read, and named.
    let base = *bundle.tables().find(LayerId(0), TableKind::Base).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[(base.offset + TABLE_BLOCK_BYTES) as usize] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let bundle = Bundle::open(&path).unwrap();
    let error = bundle.read_table(LayerId(0), TableKind::Base).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Corrupt);
    assert!(error.to_string().contains("layer 0 base block 1"), "{error}");
}
