// The collectives, as exchanges of bytes between ranks.
#pragma once
#include <vector>

#include "communicator.h"
#include "reduce.h"

namespace simulated {

// Runs the tasks of one group; returns early if the communicator is aborted.
void run_tasks(Communicator& communicator, const std::vector<Task>& tasks);

}  // namespace simulated
