//! Frequencies of the rotary position embedding, the same for every backend.

use ls_bundle::model::{RopeConfig, RopeScaling};

/// The inverse frequencies of a head: dimension i turns with dimension i + head_dim / 2 by
/// `position * frequencies[i]` radians; head_dim / 2 of them.
#[must_use]
pub fn rope_frequencies(rope: &RopeConfig, head_dim: u32) -> Vec<f32> {
    let theta = f64::from(rope.theta);
    (0..head_dim / 2)
        .map(|i| theta.powf(-2.0 * f64::from(i) / f64::from(head_dim)))
        .map(|frequency| scaled(frequency, rope.scaling) as f32)
        .collect()
}

/// One frequency (radians a position) under the model's scaling.
fn scaled(frequency: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / f64::from(factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            // How often the wave fits into the context of training: rarely -> squeezed, often -> kept.
            let turns = f64::from(original_context) * frequency / std::f64::consts::TAU;
            let (low, high) = (f64::from(low_freq_factor), f64::from(high_freq_factor));
            let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            frequency * (kept + (1.0 - kept) / f64::from(factor))
        }
    }
}

/// Cosine and sine of the turn of `frequency` at `position`.
#[must_use]
pub fn rope_turn(position: u32, frequency: f32) -> (f32, f32) {
    let (sin, cos) = (f64::from(position) * f64::from(frequency)).sin_cos();
    (cos as f32, sin as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_keeps_short_waves_and_squeezes_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let plain = rope_frequencies(&RopeConfig { theta: 5e5, scaling: RopeScaling::None }, 128);
        let squeezed = rope_frequencies(&RopeConfig { theta: 5e5, scaling }, 128);
        assert_eq!(plain[0], 1.0);
        assert_eq!(squeezed[..20], plain[..20]);
        assert!((squeezed[63] * 8.0 / plain[63] - 1.0).abs() < 1e-6);
        // Dimension 32 fits 1.84 times into the old context: (1.84 - 1) / 3 of it is kept.
        let turns = 8192.0 * f64::from(plain[32]) / std::f64::consts::TAU;
        let kept = (turns - 1.0) / 3.0;
        let want = f64::from(plain[32]) * (kept + (1.0 - kept) / 8.0);
        assert!((f64::from(squeezed[32]) / want - 1.0).abs() < 1e-6);
    }

    #[test]
    fn linear_scaling_divides_every_frequency() {
        let plain = rope_frequencies(&RopeConfig { theta: 1e4, scaling: RopeScaling::None }, 64);
        let scaling = RopeScaling::Linear { factor: 4.0 };
        let divided = rope_frequencies(&RopeConfig { theta: 1e4, scaling }, 64);
        assert!(plain.iter().zip(&divided).all(|(p, d)| (p / 4.0 - d).abs() <= 1e-7 * p));
    }
}
