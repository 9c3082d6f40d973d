//! The probe on a small file: shape of the answer, never its speed.

use std::io::Write;

use ls_io::probe::{DiskProfile, PROBE_MEMORY_BYTES, ProbePoint, bandwidth, probe};

#[test]
fn a_probe_covers_all_points_that_fit_the_file_and_its_memory() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![7; 2 << 20]).unwrap();
    file.as_file().sync_all().unwrap();
    for direct in [true, false] {
        let profile = probe(file.path(), direct, 100).unwrap();
        assert_eq!(profile.points.len(), 5 * 4, "all sizes up to 1 MiB at four depths");
        for point in &profile.points {
            assert!(point.bytes_per_s > 0.0 && point.bytes_per_s.is_finite(), "{point:?}");
            assert!(point.request_bytes * point.depth as usize <= PROBE_MEMORY_BYTES);
        }
        assert!(profile.latency_us > 0.0);
    }
    // 300 KiB is no power of two, and 1 GiB is more than the file has.
    for request_bytes in [1, 300 << 10, 1 << 30] {
        assert!(bandwidth(file.path(), request_bytes, 3, 10).unwrap() > 0.0);
    }
}

#[test]
fn a_file_below_one_request_cannot_be_probed() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[1; 100]).unwrap();
    let error = probe(file.path(), true, 10).unwrap_err().to_string();
    assert!(error.contains("100 bytes are too few"), "{error}");
}

#[test]
fn the_knee_is_the_smallest_request_near_the_best() {
    let point =
        |request_bytes, depth, bytes_per_s| ProbePoint { request_bytes, depth, bytes_per_s };
    let points = vec![
        point(4096, 1, 50.0),
        point(4096, 4, 94.0),
        point(65536, 1, 60.0),
        point(65536, 4, 96.0),
        point(1 << 20, 1, 97.0),
        point(1 << 20, 4, 100.0),
    ];
    let profile = DiskProfile { points, latency_us: 1.0 };
    assert_eq!(profile.knee(), point(65536, 4, 96.0));
    assert_eq!(profile.bytes_per_s(100_000, 8), 96.0);
    assert_eq!(profile.bytes_per_s(100_000, 2), 60.0);
    assert_eq!(profile.bytes_per_s(1, 1), 50.0);
}
