//! [`Guard`]: what a finished search has found.

use super::{Arm, GuardStage, Params};
use crate::artifact::{Artifact, RecordId};
use crate::error::Result;
use crate::recipe;
use crate::stage::Stage;
use ls_bundle::tables::Settings;
use serde::{Deserialize, Serialize};

/// What was found at one share of exact neurons.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The share that was asked for, in steps of the recipe.
    pub step: u32,
    /// Share of the neurons that ran exactly; a threshold meets what is asked only about.
    pub exact_share: f64,
    /// Tokens that this is from: all held-out ones unless fewer have told enough.
    pub tokens: u64,
    /// Logarithm of the perplexity's ratio to the dense one, on the same tokens.
    pub excess: f64,
    /// Standard error of the excess as a statement about text of this kind; none from a few dozen tokens.
    pub error: Option<f64>,
    /// The dense perplexity of the whole text times that ratio; what was measured, if on all tokens.
    pub perplexity: f64,
    /// Share of the requested blocks that were in memory.
    pub hit_ratio: f64,
    /// Bytes read for a token, padding included.
    pub bytes: u64,
}

/// An arm and what was measured of it, by steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Searched {
    /// Which.
    #[serde(flatten)]
    pub arm: Arm,
    /// Bytes that the base keeps resident, as a share of the FFNs in half precision.
    pub base_share: f64,
    /// None if the base alone is more than the budget, or others read less wherever this might do.
    pub points: Vec<Point>,
}

/// The content of the artifact's one record, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) dense_perplexity: f64,
    pub(super) measurements: u64,
    pub(super) measured_tokens: u64,
    pub(super) arms: Vec<Searched>,
}

/// What reads least within a tolerance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// How much more than the dense perplexity was allowed, as a share of it.
    pub tolerance: f64,
    /// How to run.
    #[serde(flatten)]
    pub arm: Arm,
    /// Bytes that the base keeps resident, as a share of the FFNs in half precision.
    pub base_share: f64,
    /// At which share.
    #[serde(flatten)]
    pub point: Point,
}

/// The results of a finished stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Guard {
    /// Share of the FFNs' bytes in half precision that stay in memory.
    pub resident: f64,
    /// A step of the points, as a share of the neurons.
    pub step: f64,
    /// Held-out tokens.
    pub tokens: u64,
    /// The dense model's perplexity on them.
    pub dense_perplexity: f64,
    /// Candidates that were measured, most of them on a part of the tokens.
    pub measurements: u64,
    /// Tokens that were pushed through a model for that.
    pub measured_tokens: u64,
    /// The choice for each tolerance, the largest first.
    pub choices: Vec<Choice>,
    /// The same where a threshold may select.
    pub with_thresholds: Vec<Choice>,
    /// All arms.
    pub arms: Vec<Searched>,
}

impl Guard {
    /// Reads an artifact of [`GuardStage`].
    pub fn read(artifact: &Artifact) -> Result<Guard> {
        artifact.check_stage(GuardStage::NAME)?;
        let Params { recipe, tokens, .. } = artifact.params()?;
        let text = artifact.read(RecordId::new(0, 0))?;
        let Record { dense_perplexity, measurements, measured_tokens, arms } =
            serde_json::from_slice(&text).map_err(|problem| artifact.fault(problem))?;
        let choices = |thresholds: bool| -> Vec<Choice> {
            let of = |&tolerance: &f64| choose(&arms, tokens, tolerance, thresholds);
            recipe.tolerances.iter().filter_map(of).collect()
        };
        let (choices, with_thresholds) = (choices(false), choices(true));
        let recipe::Guard { resident, step, .. } = recipe;
        Ok(Guard {
            resident,
            step,
            tokens,
            dense_perplexity,
            measurements,
            measured_tokens,
            choices,
            with_thresholds,
            arms,
        })
    }

    /// The choice for a tolerance.
    #[must_use]
    pub fn choice(&self, tolerance: f64) -> Option<&Choice> {
        self.choices.iter().find(|choice| choice.tolerance == tolerance)
    }

    /// How a bundle asks to be run so.
    #[must_use]
    pub fn settings(&self, choice: &Choice) -> Settings {
        Settings {
            exact_share: (f64::from(choice.point.step) * self.step).min(1.0) as f32,
            perplexity: choice.point.perplexity as f32,
            dense_perplexity: self.dense_perplexity as f32,
            eval_tokens: self.tokens,
        }
    }
}

/// The logarithm of what a tolerance allows.
pub(super) fn limit(tolerance: f64) -> f64 {
    (1.0 + tolerance).ln()
}

/// Of what was measured on all `tokens`.
fn choose(arms: &[Searched], tokens: u64, tolerance: f64, thresholds: bool) -> Option<Choice> {
    let allowed = arms.iter().filter(|searched| thresholds || !searched.arm.threshold);
    let kept = |point: &&Point| point.tokens == tokens && point.excess <= limit(tolerance);
    let of = |searched: &Searched| {
        let Searched { arm, base_share, ref points } = *searched;
        let point = *points.iter().filter(kept).min_by_key(|point| point.bytes)?;
        Some(Choice { tolerance, arm, base_share, point })
    };
    allowed.filter_map(of).min_by_key(|choice| choice.point.bytes)
}
