//! What logits say: likelihoods of tokens, and how far two distributions are from each other. Nats, summed in f64.

/// ln Σ exp(logit), with the largest logit taken out.
fn log_sum(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    f64::from(largest) + sum.ln()
}

/// -ln softmax(logits)\[token\].
pub(crate) fn nll(logits: &[f32], token: u32) -> f64 {
    log_sum(logits) - f64::from(logits[token as usize])
}

/// KL(P ‖ Q) = Σ p (ln p - ln q), with P = softmax(`truth`) and Q = softmax(`logits`).
pub(crate) fn divergence(truth: &[f32], logits: &[f32]) -> f64 {
    assert_eq!(truth.len(), logits.len(), "both are over the same tokens");
    let (truth_sum, sum) = (log_sum(truth), log_sum(logits));
    let terms = truth.iter().zip(logits).map(|(&truth, &logit)| {
        let p = f64::from(truth) - truth_sum;
        p.exp() * (p - (f64::from(logit) - sum))
    });
    // Rounding can leave a hair below zero.
    terms.sum::<f64>().max(0.0)
}

/// The token that is most likely; the first of several.
pub(crate) fn top(logits: &[f32]) -> usize {
    let better =
        |best: usize, index: usize| if logits[index] > logits[best] { index } else { best };
    (0..logits.len()).fold(0, better)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_by_hand() {
        // Probabilities 1/2, 1/4, 1/4 and 1/4, 1/4, 1/2, at any height.
        let (ln2, high) = (std::f32::consts::LN_2, 300.0);
        let p = [high + ln2, high, high];
        let q = [-ln2, -ln2, 0.0];
        assert!((nll(&p, 0) - 2f64.ln()).abs() < 1e-4 && (nll(&q, 0) - 4f64.ln()).abs() < 1e-6);
        let wanted = 0.5 * 2f64.ln() - 0.25 * 2f64.ln();
        assert!((divergence(&p, &q) - wanted).abs() < 1e-4, "{}", divergence(&p, &q));
        assert_eq!(divergence(&q, &q), 0.0);
        // From 1/2, 1/4, 1/4 to thirds, which is not the way back.
        let wanted = 0.5 * (1.5f64).ln() + 0.5 * (0.75f64).ln();
        assert!((divergence(&p, &[7.0; 3]) - wanted).abs() < 1e-4, "{wanted}");
        assert_eq!((top(&p), top(&q), top(&[1.0, 1.0])), (0, 2, 0));
    }
}
