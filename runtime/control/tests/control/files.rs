//! Tables and profiles as bytes.

use ls_bundle::checksum;
use ls_bundle::ids::{ByteCount, LayerId};
use ls_control::profile::{DeviceProfile, DiskPoint, KernelPoint, Visit};
use ls_control::{ControlError, Controller, CoordinationPlan, ErrorClass, Lut, Quantizer, Target};
use proptest::prelude::*;

fn target() -> Target {
    Target { device: "Board".into(), settings: "leanstream+base 20%".into(), bundle: 0xb0b }
}

fn lut() -> Lut {
    let fine = CoordinationPlan { compute: [1, 2, 4, 8], io: [8, 4, 2, 1] };
    let layers = (1..=3u64).map(|layer| {
        let loads: Vec<u64> = (0..100).map(|i| i * layer * 10).collect();
        let plans = std::array::from_fn(|state| match state {
            0 => CoordinationPlan::ONE_SHOT,
            1..9 => CoordinationPlan::uniform(1, layer.next_power_of_two() as u8),
            _ => fine,
        });
        (Quantizer::of_samples(&loads), plans)
    });
    Lut::new(target(), 4, CoordinationPlan::uniform(2, 1), layers)
}

fn visit(layer: u16) -> Visit {
    Visit {
        layer: LayerId(layer),
        plan: CoordinationPlan::uniform(2, 8),
        remaining_bytes: 500,
        first_us: 1.5,
        second_us: 2.5,
        left_bytes: 300,
        next_remaining_bytes: 700,
    }
}

fn profile() -> DeviceProfile {
    DeviceProfile {
        target: target(),
        disk_latency_us: 80.0,
        disk: vec![DiskPoint { request_bytes: 4096, depth: 1, bytes_per_s: 4e7 }],
        memory_bytes_per_s: 2e10,
        kernels: vec![KernelPoint { blocks: 100, segments: 4, time_us: 33.0 }],
        compute_point_us: 1.0,
        io_point_us: 5.0,
        work_bytes: vec![1000, 900],
        visits: vec![visit(0), Visit { remaining_bytes: 900, ..visit(1) }],
    }
}

/// The bytes with `change` made and sealed anew: what a writer with a fault would write.
fn forged(bytes: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = bytes[..bytes.len() - 8].to_vec();
    change(&mut bytes);
    let len = bytes.len() as u64 - 16;
    bytes[8..16].copy_from_slice(&len.to_le_bytes());
    bytes.extend(checksum::of(&bytes).to_le_bytes());
    bytes
}

fn put(at: usize, with: &[u8]) -> impl FnOnce(&mut Vec<u8>) + '_ {
    move |bytes| bytes[at..at + with.len()].copy_from_slice(with)
}

#[test]
fn they_read_back() {
    assert_eq!(Lut::from_bytes(&lut().to_bytes()).unwrap(), lut());
    assert_eq!(DeviceProfile::from_bytes(&profile().to_bytes()).unwrap(), profile());
}

#[test]
fn a_table_answers_by_layer_and_load() {
    let lut = Lut::from_bytes(&lut().to_bytes()).unwrap();
    assert_eq!((lut.layers(), lut.plans(), lut.horizon()), (3, 6, 4));
    let plan = |layer, bytes| lut.plan(LayerId(layer), ByteCount(bytes));
    assert_eq!(plan(0, 0), CoordinationPlan::ONE_SHOT);
    assert_eq!(plan(0, 300), CoordinationPlan::uniform(1, 1));
    assert_eq!(plan(1, 600), CoordinationPlan::uniform(1, 2));
    assert_eq!(plan(2, 900), CoordinationPlan::uniform(1, 4));
    assert_eq!(plan(2, 1 << 40).compute, [1, 2, 4, 8]);
    assert_eq!(lut.best_static().0, CoordinationPlan::uniform(2, 1));
}

#[test]
fn a_table_knows_where_it_does_not_belong() {
    let made = target();
    assert_eq!(made.misfit(&target()), None);
    let others = [
        (Target { device: "Phone".into(), ..target() }, "device `Board`, this is `Phone`"),
        (Target { bundle: 1, ..target() }, "bundle `0000000000000b0b`"),
        (Target { settings: "dense".into(), ..target() }, "settings `leanstream+base 20%`"),
    ];
    for (other, word) in others {
        let misfit = made.misfit(&other).unwrap();
        assert!(misfit.contains(word), "no {word:?} in {misfit}");
    }
}

proptest! {
    #[test]
    fn a_damaged_byte_is_found(which in 0usize..2, at: prop::sample::Index, to: u8) {
        let mut bytes = [lut().to_bytes(), profile().to_bytes()][which].clone();
        let at = at.index(bytes.len());
        prop_assume!(bytes[at] != to);
        bytes[at] = to;
        prop_assert!(Lut::from_bytes(&bytes).is_err());
        prop_assert!(DeviceProfile::from_bytes(&bytes).is_err());
    }

    /// Past the checksum too: an error, or something whose bytes are these.
    #[test]
    fn a_forged_byte_is_an_error_or_another_file(which in 0usize..2, at: prop::sample::Index, to: u8) {
        let bytes = [lut().to_bytes(), profile().to_bytes()][which].clone();
        let at = 16 + at.index(bytes.len() - 24);
        let bytes = forged(&bytes, |bytes| bytes[at] = to);
        if which == 0 {
            if let Ok(read) = Lut::from_bytes(&bytes) {
                prop_assert_eq!(read.to_bytes(), bytes);
            }
        } else if let Ok(read) = DeviceProfile::from_bytes(&bytes) {
            prop_assert_eq!(read.to_bytes(), bytes);
        }
    }

    #[test]
    fn half_a_file_is_incomplete(which in 0usize..2, cut: prop::sample::Index) {
        let bytes = [lut().to_bytes(), profile().to_bytes()][which].clone();
        let bytes = &bytes[..cut.index(bytes.len())];
        let error = if which == 0 {
            Lut::from_bytes(bytes).unwrap_err()
        } else {
            DeviceProfile::from_bytes(bytes).unwrap_err()
        };
        prop_assert_eq!(error.class(), ErrorClass::Incomplete);
    }
}

fn expect<T: std::fmt::Debug>(read: Result<T, ControlError>, class: ErrorClass, word: &str) {
    let error = read.unwrap_err();
    assert_eq!(error.class(), class, "{error}");
    assert!(error.to_string().contains(word), "no {word:?} in {error}");
}

#[test]
fn hostile_tables_are_refused() {
    let bytes = lut().to_bytes();
    // Target: bundle 8, device 4 + 5, settings 4 + 19; behind the head of 16.
    let at = 16 + 8 + 9 + 23;
    let count = |number: u32| number.to_le_bytes();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (forged(&bytes, put(24, &count(257))), "device's name"),
        (forged(&bytes, put(28, &[0xff])), "UTF-8"),
        (forged(&bytes, put(at, &count(0))), "layers ahead"),
        (forged(&bytes, put(at + 4, &count(0))), "layers"),
        (forged(&bytes, put(at + 4, &count(1025))), "layers"),
        (forged(&bytes, put(at + 4, &count(4))), "bytes left"),
        (forged(&bytes, put(at + 8, &count(u32::MAX))), "plans"),
        (forged(&bytes, put(at + 12, &[3])), "plan"),
        (forged(&bytes, put(at + 12 + 3, &[0])), "plan"),
        (forged(&bytes, put(at + 12 + 48, &[6])), "one of 6"),
        (forged(&bytes, put(at + 12 + 50, &[0xff; 8])), "ascending"),
        (forged(&bytes, put(at + 12 + 50 + 120, &[9, 9])), "one of 6"),
        (forged(&bytes, |bytes| bytes.push(0)), "behind the end"),
    ];
    for (bytes, word) in cases {
        expect(Lut::from_bytes(&bytes), ErrorClass::Corrupt, word);
    }
    expect(Lut::from_bytes(&profile().to_bytes()), ErrorClass::Unsupported, "LSLU");
    expect(Lut::from_bytes(&forged(&bytes, put(4, &[2]))), ErrorClass::Unsupported, "version");
    let mut long = bytes;
    long.push(0);
    expect(Lut::from_bytes(&long), ErrorClass::Corrupt, "bytes");
}

#[test]
fn hostile_profiles_are_refused() {
    let bytes = profile().to_bytes();
    let at = 16 + 8 + 9 + 23;
    let layers = at + 4 + 4 + 12 + 4 + 4 + 12 + 8;
    let visits = layers + 4 + 16;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (forged(&bytes, put(at, &(-1.0f32).to_le_bytes())), "latency"),
        (forged(&bytes, put(at, &f32::NAN.to_le_bytes())), "latency"),
        (forged(&bytes, put(at + 4, &2000u32.to_le_bytes())), "points of the disk"),
        (forged(&bytes, put(layers, &0u32.to_le_bytes())), "layers"),
        (forged(&bytes, put(layers + 4, &u64::MAX.to_le_bytes())), "bytes of a layer"),
        (forged(&bytes, put(layers + 4, &10u64.to_le_bytes())), "remaining bytes"),
        (forged(&bytes, put(visits, &u32::MAX.to_le_bytes())), "visits"),
        (forged(&bytes, put(visits, &3u32.to_le_bytes())), "bytes left"),
        (forged(&bytes, put(visits + 4, &2u16.to_le_bytes())), "layer of a visit"),
        (forged(&bytes, put(visits + 4 + 10 + 16, &1001u64.to_le_bytes())), "left bytes"),
        (forged(&bytes, put(visits + 4 + 10 + 24, &901u64.to_le_bytes())), "next remaining bytes"),
        (forged(&bytes, put(visits + 4 + 10 + 8, &f32::INFINITY.to_le_bytes())), "time"),
        (forged(&bytes, |bytes| bytes.push(0)), "behind the end"),
    ];
    for (bytes, word) in cases {
        expect(DeviceProfile::from_bytes(&bytes), ErrorClass::Corrupt, word);
    }
}

#[test]
#[should_panic(expected = "remaining bytes of a visit: 1001 found, at most 1000 wanted")]
fn a_profile_that_contradicts_itself_is_not_written() {
    let visits = vec![Visit { remaining_bytes: 1001, ..visit(0) }];
    let _ = DeviceProfile { visits, ..profile() }.to_bytes();
}

#[test]
fn files_are_replaced_and_named_in_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device.lsp");
    let error = DeviceProfile::open(&path).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Io);
    profile().save(&path).unwrap();
    assert_eq!(DeviceProfile::open(&path).unwrap(), profile());
    lut().save(&path).unwrap();
    assert_eq!(Lut::open(&path).unwrap(), lut());
    let error = DeviceProfile::open(&path).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Unsupported);
    assert!(error.to_string().contains("device.lsp: unusable device profile: magic"), "{error}");
    assert!(lut().save(&folder.path().join("no/such/folder")).is_err());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "something was left behind");
}
