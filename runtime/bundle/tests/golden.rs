//! Bundles of every released version open, and the one of this version is made again byte for byte.

mod sample;

use ls_bundle::Bundle;
use ls_bundle::ids::{LayerId, NeuronId, TokenId};
use ls_bundle::tables::TableKind;
use std::path::Path;

fn golden(version: u32) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/golden");
    folder.join(format!("tiny-v{version}.lsb"))
}

/// Numbers written down, not computed: they hold whatever the code becomes.
#[test]
fn version_1_opens_with_its_contents() {
    let bundle = Bundle::open(&golden(1)).unwrap();
    bundle.verify(&mut |_, _| ()).unwrap();
    assert_eq!(bundle.identity().seed, 7);
    assert_eq!(bundle.model().name, "tiny");
    assert_eq!(bundle.model().special.stop, [2, 3]);
    assert_eq!(bundle.tokenizer(), r#"{"version":"1.0"}"#);
    assert_eq!(bundle.chat_template(), Some("{{ messages }}"));
    assert_eq!(bundle.vocabulary().piece(TokenId(9)), b" w9");
    assert_eq!(bundle.placement().unwrap().layer(LayerId(1))[0], NeuronId(1));
    assert_eq!(bundle.vectors().final_norm.len(), 10);
    assert!(bundle.tables().tables.is_empty() && bundle.settings().is_none());
}

#[test]
fn version_2_opens_with_what_was_learned() {
    let bundle = Bundle::open(&golden(2)).unwrap();
    bundle.verify(&mut |_, _| ()).unwrap();
    let read = |layer, kind| bundle.read_table(LayerId(layer), kind).unwrap();
    assert_eq!(read(0, TableKind::Predictor).unwrap()[..4], [59, 55, 11, 239]);
    assert_eq!(read(1, TableKind::Reuse).unwrap().len(), 1);
    assert_eq!(read(1, TableKind::Predictor), None);
    assert_eq!(bundle.settings().unwrap().exact_share, 0.2);
}

#[test]
fn the_same_bytes_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.lsb");
    let parts = [sample::tiny_parts(), sample::learned_parts()];
    for (version, parts) in (1..).zip(parts) {
        sample::write(&path, parts, 1).unwrap();
        assert!(
            std::fs::read(&path).unwrap() == std::fs::read(golden(version)).unwrap(),
            "format {version} has changed: see examples/golden.rs"
        );
    }
}
