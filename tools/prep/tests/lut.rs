//! `ls-prep lut`, from a made-up device's profile to a table that answers.

use ls_bundle::ids::{ByteCount, LayerId};
use ls_control::execution::Costs;
use ls_control::explore::{Enough, candidates, explore};
use ls_control::profile::DeviceProfile;
use ls_control::world::{World, WorldLayer};
use ls_control::{Controller, Lut, Target};
use std::path::Path;
use std::process::{Command, Output};

/// Both frequencies' ends: the whole action space takes seconds.
const RECIPE: &str = "extends = \"full\"\nname = \"coarse\"\n[lut]\nfrequencies = [1, 8]\n";

fn profile() -> DeviceProfile {
    let layer = WorldLayer {
        costs: Costs {
            lead_us: 100.0,
            read_us: 50.0,
            read_us_per_byte: 1e-3,
            read_us_per_segment: 10.0,
            compute_us_per_byte: 5e-4,
            compute_us_per_segment: 20.0,
        },
        work_bytes: 1 << 20,
        missing_bytes: (0..60).map(|i| i * 16_000).collect(),
        // What a layer does changes nothing for the next.
        useful: [0.0, 0.0],
    };
    let target = Target { device: "made up".into(), settings: "none".into(), bundle: 5 };
    let mut profile = DeviceProfile { target, ..DeviceProfile::default() };
    let mut world = World::new(vec![layer; 2], 3);
    let Ok(_) = explore(&mut world, &mut profile, &candidates(), Enough::DEFAULT, |progress| {
        progress.visits < 3_000
    });
    profile
}

fn lut(profile: &Path, more: &[&str]) -> Output {
    let recipe = profile.with_file_name("coarse.toml");
    std::fs::write(&recipe, RECIPE).unwrap();
    Command::new(env!("CARGO_BIN_EXE_ls-prep"))
        .args(["lut", "--json", "--profile"])
        .arg(profile)
        .arg("--recipe")
        .arg(recipe)
        .args(more)
        .output()
        .unwrap()
}

#[test]
fn a_profile_becomes_a_table() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device.lsp");
    profile().save(&path).unwrap();
    let output = lut(&path, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let table = Lut::open(&dir.path().join("device.lut")).unwrap();
    assert_eq!((table.layers(), table.horizon()), (2, 4));
    assert_eq!(table.target(), &profile().target);
    // Nothing to load: no point is worth its cost. Most to load: some are.
    let points = |bytes| table.plan(LayerId(0), ByteCount(bytes)).points()[0];
    assert!(points(0) < points(900_000), "{} {}", points(0), points(900_000));
    assert!(told["error"]["total"].as_f64().unwrap() < 0.01, "{told}");
    assert_eq!(told["choices"], 2 * 16 * 257);
    let expected = |name: &str| told["expected_us"][name].as_f64().unwrap();
    assert!(
        expected("lut") <= expected("static") && expected("static") <= expected("fixed"),
        "{told}"
    );
}

#[test]
fn what_is_no_profile_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device.lsp");
    let code = |more: &[&str], word: &str| {
        let output = lut(&path, more);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(word), "no {word:?} in {message}");
        assert_eq!(message.trim_end().lines().count(), 1, "{message}");
        output.status.code().unwrap()
    };
    assert_eq!(code(&[], "device.lsp"), 7);
    let bytes = profile().to_bytes();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(code(&[], "bytes"), 4);
    std::fs::write(&path, b"something else").unwrap();
    assert_eq!(code(&[], "magic"), 5);
    let empty = DeviceProfile { visits: Vec::new(), ..profile() };
    empty.save(&path).unwrap();
    assert_eq!(code(&[], "no visit"), 4);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/golden");
    let bundle = std::fs::read_dir(golden)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|e| e == "lsb"))
        .unwrap();
    profile().save(&path).unwrap();
    assert_eq!(code(&["--bundle", bundle.to_str().unwrap()], "another bundle"), 5);
    assert!(!dir.path().join("device.lut").exists());
}
