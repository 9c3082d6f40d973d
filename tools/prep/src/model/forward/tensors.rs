//! What stands between two products as tensor operations, for a card; [`super`] has the loops that say the same.

use super::Layer;
use candle_core::{Result, Tensor};

/// What [`Layer::heads`] does behind the product.
pub(super) fn heads(
    layer: &Layer<'_>,
    rows: Tensor,
    bias: &[f32],
    gain: Option<&[f32]>,
) -> Result<Tensor> {
    let (tokens, width) = rows.dims2()?;
    let (head_dim, length) = (layer.config.head_dim as usize, layer.window);
    let vector = |values: &[f32]| Tensor::from_slice(values, values.len(), layer.device);
    let rows = if bias.is_empty() { rows } else { rows.broadcast_add(&vector(bias)?)? };
    let Some(gain) = gain else { return Ok(rows) };
    let mut heads = rows.reshape((tokens / length, length, width / head_dim, head_dim))?;
    if !gain.is_empty() {
        heads = candle_nn::ops::rms_norm(&heads, &vector(gain)?, layer.config.norm_epsilon)?;
    }
    let (cos, sin): (Vec<f32>, Vec<f32>) = layer.turns.iter().copied().unzip();
    let [cos, sin] =
        [cos, sin].map(|turns| Tensor::from_vec(turns, (length, head_dim / 2), layer.device));
    let heads = heads.transpose(1, 2)?.contiguous()?;
    let turned = candle_nn::rotary_emb::rope(&heads, &cos?, &sin?)?;
    turned.transpose(1, 2)?.reshape((tokens, width))
}

/// Softmax of the scores (heads x positions x keys) of positions from `start` on, which see `reach` keys up to their own.
pub(super) fn softmax(scores: &Tensor, start: usize, reach: usize) -> Result<Tensor> {
    let (_, count, seen) = scores.dims3()?;
    // What is added: nothing, or minus infinity where a position may not look.
    let row = |position: usize| {
        let visible = (position + 1).saturating_sub(reach)..position + 1;
        (0..seen).map(move |key| if visible.contains(&key) { 0.0 } else { f32::NEG_INFINITY })
    };
    let mask: Vec<f32> = (start..start + count).flat_map(row).collect();
    let mask = Tensor::from_vec(mask, (count, seen), scores.device())?;
    candle_nn::ops::softmax_last_dim(&scores.broadcast_add(&mask)?)
}

/// Takes a piece of the logits into each row's state of [`super::Forward::nll`], by tensor operations.
pub(super) fn add_piece(
    states: &mut [(f64, f64, f64)],
    targets: &[u32],
    first: u32,
    logits: &Tensor,
) -> Result<()> {
    let (rows, width) = logits.dims2()?;
    let inside = |&target: &u32| target.checked_sub(first).filter(|&i| i < width as u32);
    let places: Vec<u32> = targets.iter().map(|target| inside(target).unwrap_or(0)).collect();
    let places = Tensor::from_vec(places, (rows, 1), logits.device())?;
    let found: Vec<f32> = logits.gather(&places, 1)?.flatten_all()?.to_vec1()?;
    let tops = logits.max_keepdim(1)?;
    let sums: Vec<f32> = logits.broadcast_sub(&tops)?.exp()?.sum(1)?.to_vec1()?;
    let tops: Vec<f32> = tops.flatten_all()?.to_vec1()?;
    for (row, state) in states.iter_mut().enumerate() {
        let (top, sum) = (f64::from(tops[row]), f64::from(sums[row]));
        let largest = state.0.max(top);
        state.1 = state.1 * (state.0 - largest).exp() + sum * (top - largest).exp();
        state.0 = largest;
        if inside(&targets[row]).is_some() {
            state.2 = f64::from(found[row]);
        }
    }
    Ok(())
}
