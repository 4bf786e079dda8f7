//! Routing decisions for measurements: random weights have random routers, whose choices hardly change from step to
//! step, and trained routers prefer some experts.

use std::fmt;

use serde::{Serialize, Serializer};
use unweight_format::testing::Random;
use unweight_rt::experts::ReplaceRouting;

/// Which experts the tokens of a measured step choose, if some experts are in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Routing {
    /// Those of the model's routers.
    #[default]
    Model,
    /// Random experts, all equally likely.
    Uniform,
    /// Random experts; the `n`-th most likely one of a layer has a share proportional to `1 / n`.
    Zipf,
}

impl Routing {
    /// Every routing.
    pub const ALL: &[Self] = &[Self::Model, Self::Uniform, Self::Zipf];

    /// The name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }

    /// Returns decisions for the layers of a model in turn; `None` for those of the model.
    pub(crate) fn decisions(self, layers: u32, experts: u32, top_k: u32) -> Option<ReplaceRouting> {
        if self == Self::Model {
            return None;
        }
        let mut generator = Generator::new(self, layers, experts);
        let top_k = top_k.clamp(1, experts.max(1)) as usize;
        Some(ReplaceRouting::new(move |ids: &mut [u32]| generator.next_layer(ids, top_k)))
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Routing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.name().serialize(serializer)
    }
}

/// Draws experts without replacement.
struct Generator {
    random: Random,
    /// The sums of the shares of the most likely experts, in units of 2^-32 of all.
    sums: Vec<u64>,
    /// By layer: the experts in the order of their shares.
    orders: Vec<Vec<u32>>,
    layer: usize,
}

impl Generator {
    fn new(routing: Routing, layers: u32, experts: u32) -> Self {
        let mut random = Random::new(17);
        let share = |rank: u32| if routing == Routing::Zipf { f64::from(rank + 1).recip() } else { 1.0 };
        let total: f64 = (0..experts).map(share).sum();
        let mut sum = 0.0;
        let sums = (0..experts).map(|rank| {
            sum += share(rank);
            (sum / total * 4_294_967_296.0) as u64
        });
        let sums = sums.collect();
        let mut order = || {
            let mut order: Vec<u32> = (0..experts).collect();
            for at in (1..order.len()).rev() {
                order.swap(at, random.below(at as u64 + 1) as usize);
            }
            order
        };
        let orders = (0..layers.max(1)).map(|_| order()).collect();
        Self { random, sums, orders, layer: 0 }
    }

    /// Overwrites the experts of the tokens of a layer, `top_k` different ones each.
    fn next_layer(&mut self, ids: &mut [u32], top_k: usize) {
        let order = &self.orders[self.layer];
        self.layer = (self.layer + 1) % self.orders.len();
        for token in ids.chunks_mut(top_k) {
            for at in 0..token.len() {
                // Rejecting repetitions draws without replacement.
                token[at] = loop {
                    let drawn = self.random.below(1 << 32);
                    let rank = self.sums.partition_point(|sum| *sum <= drawn).min(order.len() - 1);
                    if !token[..at].contains(&order[rank]) {
                        break order[rank];
                    }
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn tokens_choose_different_experts_with_the_shares_of_the_routing() {
        for (routing, hottest, coldest) in [(Routing::Uniform, 0.0078, 0.0078), (Routing::Zipf, 0.184, 0.00144)] {
            let mut generator = Generator::new(routing, 2, 128);
            let orders = generator.orders.clone();
            assert_ne!(orders[0], orders[1]);
            let mut counts = [[0u32; 128]; 2];
            for call in 0..40_000 {
                // One expert per token: shares are those of a single draw.
                let mut ids = [u32::MAX];
                generator.next_layer(&mut ids, 1);
                counts[call % 2][ids[0] as usize] += 1;
            }
            for (counts, order) in counts.iter().zip(&orders) {
                let share = |rank: usize| f64::from(counts[order[rank] as usize]) / 20_000.0;
                let (first, last) = (share(0), (120..128).map(share).sum::<f64>() / 8.0);
                assert!((first / hottest - 1.0).abs() < 0.25, "{routing}: {first}");
                assert!((last / coldest - 1.0).abs() < 0.25, "{routing}: {last}");
            }
            let mut ids = [u32::MAX; 8 * 5];
            generator.next_layer(&mut ids, 8);
            for token in ids.chunks(8) {
                assert_eq!(token.iter().collect::<BTreeSet<_>>().len(), 8, "{token:?}");
                assert!(token.iter().all(|id| *id < 128));
            }
        }
        // All experts of a layer.
        let mut ids = [9; 4];
        Generator::new(Routing::Zipf, 1, 4).next_layer(&mut ids, 4);
        assert_eq!(ids.iter().sum::<u32>(), 6);
        assert!(Routing::Model.decisions(1, 8, 2).is_none() && Routing::Zipf.decisions(1, 8, 2).is_some());
    }
}
